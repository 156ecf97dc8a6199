"""Time a denoiser of published size with random weights: plain, watched, and its second moments.

``python docs/measure_observed_denoiser.py [sdxl [BATCH,... [SIZE [STEPS]]]]`` prints milliseconds a
step of each, and their ratios to the plain run, on a GPU.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from diffusers import EulerDiscreteScheduler
from torch import nn

from quantkit.bench.models.denoiser_inputs import make_inputs
from quantkit.bench.models.denoisers import build_denoiser, find_denoiser
from quantkit.calibration.moments.moment_collector import MomentCollector
from quantkit.calibration.observing.hooks import Collector
from quantkit.models.component_layers import Layer
from quantkit.models.families import find_family
from quantkit.pipelines.batches import at_once, split_batches
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.storage.tensorfile import TensorInfo

#: Of the second moments' rows.
SHARES = (1.0, 0.25)
#: Of attention whose errors are measured, as recipes have it.
_KEYS = 512


def layers_of(model: nn.Module, class_name: str) -> tuple[Layer, ...]:
    """Return the layers that the model's family packs."""
    family = find_family(class_name)
    return tuple(
        _layer(name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and family.keep_reason(name, tuple(module.weight.shape)) is None
    )


def _layer(name: str, module: nn.Linear | nn.Conv2d) -> Layer:
    kind = "linear" if isinstance(module, nn.Linear) else "conv2d"
    info = TensorInfo(f"{name}.weight", "F16", tuple(module.weight.shape), 0, 0)
    return Layer(name, kind, info, Path(), bias=module.bias is not None)


def milliseconds(step: Callable[[Any], object], timesteps: Sequence[Any]) -> float:
    """Return what a step takes, the first of which is not counted."""
    step(timesteps[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for timestep in timesteps[1:]:
        step(timestep)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000 / (len(timesteps) - 1)


class Measured:
    """A denoiser with its inputs of one batch."""

    def __init__(self, name: str, batch: int, size: int, steps: int) -> None:
        """Build it, on the GPU."""
        found, device = find_denoiser(name), torch.device("cuda")
        self.model = build_denoiser(found, device)
        self.layers = layers_of(self.model, found.class_name)
        self.inputs = make_inputs(self.model, batch, size, device)
        self.seeds = range(max(batch // 2, 1))
        self.scheduler: Any = EulerDiscreteScheduler()
        self.scheduler.set_timesteps(steps + 1, device=device)

    def step(self, timestep: Any) -> None:
        """Run the denoiser once."""
        self.model(**{**self.inputs, "timestep": timestep})

    def time(self, watching: AbstractContextManager[None]) -> float:
        """Return milliseconds a step while it is watched."""
        with watching:
            return milliseconds(self.step, list(self.scheduler.timesteps))

    def statistics(self, errors_from: int | None = None) -> float:
        """Return milliseconds a step with statistics taken, and errors of attention's formats."""
        buckets = min(4, len(self.scheduler.timesteps))
        watch = Collector("unet", self.model, self.layers, buckets, errors_from=errors_from)
        prompts = split_batches(["" for _ in self.seeds], CalibrationRecipe())
        watch.begin_batch(self.seeds, at_once(prompts).sizes)
        return self.time(watch.attached(self.scheduler, lambda _: None))

    def moments(self, share: float) -> float:
        """Return milliseconds a step with second moments taken, of all layers at once."""
        settings = CalibrationRecipe(row_share=share)
        watch = MomentCollector("unet", self.model, self.layers, settings)
        return self.time(watch.attached(self.scheduler, lambda _: None))


def report(found: Measured, batch: int) -> None:
    """Print what a step takes plain, and with each kind of watching."""
    plain = found.time(nullcontext())
    click.echo(f"batch {batch}, {len(found.layers)} layers: plain {plain:.1f} ms")
    taken = {
        "statistics": found.statistics(),
        "with errors of formats": found.statistics(_KEYS),
        **{f"moments of {share:g} of the rows": found.moments(share) for share in SHARES},
    }
    for what, step in taken.items():
        click.echo(f"  {what}: {step:.1f} ms, {step / plain:.2f} times")


@torch.no_grad()
def main() -> None:
    """Print a line for each batch, and for all that is watched."""
    name, batches, *numbers = [*sys.argv[1:], *("sdxl", "2,4,8")[len(sys.argv[1:]) :]]
    size, steps = (*map(int, numbers), *(128, 4)[len(numbers) :])
    for batch in map(int, batches.split(",")):
        report(Measured(name, batch, size, steps), batch)


if __name__ == "__main__":
    main()
