"""How often pictures are called the same, variants or broken, on the bundled pipeline.

python docs/measure_pictures.py PACKED...: 48 prompts of the demo, 12 steps, on a CPU. Beside the
packed directories, on reference: the original in bfloat16, in other batches, from other noise
(variants by definition), and with random weights in one layer at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from quantkit.eval.judging.noise_floor import picture_names, wide_products
from quantkit.eval.measuring.backbones import Backbones, load_clip
from quantkit.eval.measuring.comparison import Comparison, compare
from quantkit.eval.measuring.composition import find_bounds, sort_pictures
from quantkit.eval.measuring.generation import generate, make_settings
from quantkit.eval.measuring.pictures import Pairs

from quantkit.device.backends import Backend, use
from quantkit.inference.loading.pipeline_loading import load_pipeline as load_packed
from quantkit.models.source import open_model
from quantkit.pipelines.running import load_pipeline, quiet_libraries, read_prompts
from quantkit.resources import demo_assets

COUNT, STEPS, SEED, OTHER_SEED = 48, 12, 100, 1000
CPU = torch.device("cpu")
PROMPTS = read_prompts(demo_assets() / "prompts.txt")[:COUNT]
#: Layers that get random weights of the same spread, one at a time.
SPOILED = (
    "mid_block.resnets.0.conv1",
    "up_blocks.1.attentions.0.transformer_blocks.0.attn2.to_v",
    "down_blocks.0.resnets.0.conv1",
    "time_embedding.linear_2",
    "up_blocks.2.resnets.1.conv1",
)
FLOORS = ("bfloat16", "batches of 8 instead of 16")


def draw(pipe: Any, *, seed: int = SEED, batch: int = 16) -> tuple[Any, ...]:
    """Return the pictures of a pipeline."""
    settings = make_settings(PROMPTS, steps=STEPS, guidance=4.0, seed=seed, batch=batch)
    return generate(pipe, settings, label="").pictures


def fresh(dtype: torch.dtype = torch.float32) -> Any:
    """Return the bundled pipeline."""
    return load_pipeline(open_model(str(demo_assets() / "pipeline")), CPU, dtype)


def spoiled(layer: str) -> Any:
    """Return it with random weights in one layer."""
    pipe = fresh()
    weight = pipe.unet.get_submodule(layer).weight.data
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.copy_(noise * weight.std())
    return pipe


def runs(packed: tuple[Path, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name and the pictures of every run."""
    with wide_products(CPU):
        yield FLOORS[0], draw(fresh(torch.bfloat16))
    yield FLOORS[1], draw(fresh(), batch=8)
    for path in packed:
        with use(Backend.REFERENCE):
            yield path.name, draw(load_packed(str(path), torch_dtype=torch.float32, device=CPU))
    yield "other noise", draw(fresh(), seed=OTHER_SEED)
    for layer in SPOILED:
        yield f"random weights in {layer}", draw(spoiled(layer))


def row(name: str, found: Comparison, floors: list[Comparison]) -> str:
    """Return the counts of one run, its least SSIM, largest distance and least match."""
    seen, pictures = found.resemblance, sort_pictures(found, find_bounds(floors))
    assert seen is not None
    distances = [value for value in seen.distances if value is not None]
    matches = [value for value in seen.matches if value is not None]
    counts = " | ".join(str(count) for count in pictures.counts.values())
    ssim = min(found.scores["ssim"].values)
    return f"| {name} | {counts} | {ssim:.2f} | {max(distances):.3f} | {min(matches):.2f} |"


@click.command()
@click.argument("packed", nargs=-1, type=click.Path(path_type=Path))
def main(packed: tuple[Path, ...]) -> None:
    """Print a table."""
    with quiet_libraries():
        clip = load_clip(str(demo_assets() / "clip"), device=CPU)
        original = draw(fresh())
        floors = list[Comparison]()
        click.echo(
            "| run | same | variant | broken | least SSIM | largest distance | least match |"
        )
        click.echo("|---|---|---|---|---|---|---|")
        for name, pictures in runs(packed):
            pairs = Pairs(picture_names(COUNT), original, pictures, PROMPTS)
            found = compare(pairs, Backbones(clip=clip))
            if name in FLOORS:
                floors.append(found)
            click.echo(row(name, found, floors))


if __name__ == "__main__":
    main()
