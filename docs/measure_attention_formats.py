"""Draw the demo's prompts with attention as each strategy has it, and print what it chose.

``python docs/measure_attention_formats.py FOLDER [PROMPTS]`` prints relative errors by module and
format, then for every strategy, and for ``adaptive`` within several budgets, how many modules have
each format and SSIM to the pictures of torch's attention. Errors and static scales are those of a
calibration on 16 of the prompts and other seeds.
"""

import sys
from collections import Counter
from pathlib import Path
from statistics import median

import click
import numpy as np
import torch
from diffusers import DiffusionPipeline
from measure_attention import ASSETS, DEVICE, OTHER_SEED, PROMPTS, SEEN, draw
from skimage.metrics import structural_similarity

import quantkit
from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.checkpoint.packed_attention import CHILD
from quantkit.device.backends import Backend, use
from quantkit.inference.attention.coded_attention import install
from quantkit.inference.layers import head_scales
from quantkit.models.source import open_model
from quantkit.numerics.attention_formats import ATTENTION_FORMATS
from quantkit.packing.attention_plan import plan_attention
from quantkit.recipe.attention_recipe import STRATEGIES, AttentionRecipe
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.schema import Recipe

#: of ``adaptive``, besides its own
BUDGETS = (0.005, 0.01)


def sections() -> dict[str, AttentionRecipe]:
    """Return what is drawn, by name; keys are as few as the pipeline's attention has."""
    named = {name: {"strategy": name} for name in STRATEGIES}
    more = {f"adaptive, {b:g}": {"strategy": "adaptive", "error_budget": b} for b in BUDGETS}
    return {
        name: AttentionRecipe.model_validate({"min_keys": 1, **keys})
        for name, keys in {**named, **more}.items()
    }


def give(pipe: DiffusionPipeline, section: AttentionRecipe, seen: dict) -> Counter[str]:
    """Give the denoiser attention as a packed one has it, and return modules by format."""
    (component,) = open_model(ASSETS / "pipeline").components
    planned = plan_attention(component, section, seen)
    quantkit.attention(pipe, qk=None)
    if planned.packed is None:
        return Counter({"16 bit": len(seen)})
    head_scales.install(pipe.unet, planned.packed.static)
    for name, numbers in planned.tensors.items():
        module, _, part = name.rpartition(f".{CHILD}.")
        getattr(pipe.unet.get_submodule(module), CHILD).fill(part, numbers.to(DEVICE))
    install(pipe.unet, planned.packed)
    kept = set(planned.packed.exclude)
    return Counter("16 bit" if n in kept else planned.packed.format_of(n).name for n in seen)


def print_errors(seen: dict[str, AttentionStatistics]) -> None:
    """Print the median and the largest error of a module by format, self attention apart."""
    for kind in ("attn1", "attn2"):
        of_kind = [s.format_errors() or {} for n, s in seen.items() if n.endswith(kind)]
        for row in ATTENTION_FORMATS:
            errors = [found[row.name] for found in of_kind]
            click.echo(f"{kind}, {row.name}: median {median(errors):.4f}, worst {max(errors):.4f}")


def main() -> None:
    """Print a line for every strategy."""
    folder = Path(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else PROMPTS
    prompts = (ASSETS / "prompts.txt").read_text(encoding="utf-8").split("\n")
    run = CalibrationRecipe(steps=20, guidance=4.0, seed=OTHER_SEED)
    adaptive = Recipe(name="adaptive", attention=sections()["adaptive"], calibration=run)
    found = quantkit.calibrate(ASSETS / "pipeline", recipe=adaptive, prompts=prompts, count=SEEN)
    seen = dict(found.calibration.attention["unet"])
    print_errors(seen)
    pipe = DiffusionPipeline.from_pretrained(ASSETS / "pipeline", torch_dtype=torch.float32)
    pipe.to(DEVICE).set_progress_bar_config(disable=True)
    original, _ = draw(pipe, prompts[:count], folder / "original")
    for name, section in sections().items():
        formats = give(pipe, section, seen)
        pictures, _ = draw(pipe, prompts[:count], folder / name.replace(", ", "-"))
        pairs = zip(original, pictures, strict=True)
        scores = [structural_similarity(a, b, channel_axis=2, data_range=1.0) for a, b in pairs]
        chosen = ", ".join(f"{count} {fmt}" for fmt, count in sorted(formats.items()))
        click.echo(f"{name}: {chosen}: SSIM {np.mean(scores):.4f}, worst {np.min(scores):.4f}")


if __name__ == "__main__":
    # Not torch's, where that is faster.
    with use(Backend.GPU if DEVICE.type == "cuda" else Backend.HOST):
        main()
