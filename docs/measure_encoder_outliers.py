"""Print what embeddings lose by format, of random encoders with and without planted outliers."""

import itertools
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

from quantkit.recipe.schema import Recipe
from quantkit.workflow.pack import pack

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.encoders import embed, encoder_class
from tests.support.outliers import SIZES, encoder_with_outliers


def loss(source: Path, packed: Path, class_name: str) -> float:
    """Return ||difference|| / ||embeddings||."""
    cls = encoder_class(class_name)
    wanted, found = (
        embed(cls.from_pretrained(folder, dtype=torch.float32)) for folder in (source, packed)
    )
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    """Print a line for every encoder, factor, format and kind of input."""
    formats = ("e4m3fn", "int8", "int4")
    for class_name, factor in itertools.product(SIZES, (1, 64)):
        for fmt, mode in itertools.product(formats, ("none", "token")):
            with TemporaryDirectory() as folder:
                source, packed = Path(folder) / "source", Path(folder) / "packed"
                encoder_with_outliers(class_name, factor).save_pretrained(source)
                section = {
                    "weight": {"format": fmt, "observer": "mse"},
                    "activation": {"mode": mode},
                    "data_free": True,
                }
                recipe = Recipe.model_validate({"name": "outliers", "text_encoders": section})
                pack(source, output=packed, recipe=recipe)
                lost = loss(source, packed, class_name)
            click.echo(f"{class_name} x{factor} {fmt}, inputs {mode}: {lost:.4f}")


if __name__ == "__main__":
    main()
