"""How far one forward of a packed UNet moves when its input moves by 1e-7 of itself.

python docs/measure_repeats.py PIPELINE PACKED...: the same eight inputs of noise, at eight
timesteps, in float32 on the CPU, through the 16-bit UNet and every packed one.
"""

from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import quantkit
from quantkit.models.source import open_model
from quantkit.pipelines.running import load_pipeline, quiet_libraries

TIMESTEPS = (20, 140, 260, 380, 500, 620, 740, 860)
#: As another order of a sum does in float32, whose steps are 1.2e-7.
MOVED = 1e-7


def _inputs(unet: Any) -> tuple[Tensor, Tensor]:
    size, made = unet.config.sample_size, torch.Generator().manual_seed(0)
    shape = (len(TIMESTEPS), unet.config.in_channels, size, size)
    sample = torch.randn(shape, generator=made)
    prompt = torch.randn(len(TIMESTEPS), 16, unet.config.cross_attention_dim, generator=made)
    return sample, prompt


def _answers(unet: Any, sample: Tensor, prompt: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = unet(sample, torch.tensor(TIMESTEPS), prompt).sample
    return found


def moved(unet: Any) -> tuple[float, float]:
    """Return the least and the largest relative change of an answer."""
    sample, prompt = _inputs(unet)
    noise = torch.randn(sample.shape, generator=torch.Generator().manual_seed(1))
    before = _answers(unet, sample, prompt).flatten(1)
    after = _answers(unet, sample * (1 + MOVED * noise), prompt).flatten(1)
    change = (after - before).norm(dim=1) / before.norm(dim=1)
    return float(change.min()), float(change.max())


@click.command()
@click.argument("pipeline", type=Path)
@click.argument("packed", type=Path, nargs=-1)
def main(pipeline: Path, packed: tuple[Path, ...]) -> None:
    """Print a line for each."""
    with quiet_libraries():
        model = open_model(pipeline)
        unet = load_pipeline(model, torch.device("cpu"), torch.float32).unet
        least, largest = moved(unet)
        click.echo(f"{pipeline}: {least:.2g} to {largest:.2g}")
        for folder in packed:
            unet = quantkit.load_pipeline(folder, torch_dtype=torch.float32).unet
            least, largest = moved(unet)
            click.echo(f"{folder}: {least:.2g} to {largest:.2g}")


if __name__ == "__main__":
    main()
