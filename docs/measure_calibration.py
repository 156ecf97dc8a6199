"""Time drawing pictures' latents with a pipeline, and calibrating it on the same prompts.

``python docs/measure_calibration.py [cpu|cuda [PROMPTS [STEPS [BATCH]]]]`` prints seconds of both,
loading aside, and their ratio, of the bundled pipeline; on a CPU, seconds of the process, so that
others on the same cores do not count.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
import torch

from quantkit.calibration.collect import observed_layers
from quantkit.calibration.observed_pipeline import ObservedPipeline
from quantkit.models.source import open_model
from quantkit.pipelines.running import load_pipeline, run_batch, split_batches
from quantkit.progress import silent
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.schema import Recipe

ASSETS = Path(__file__).parents[1] / "eval" / "assets"


def waited(device: str) -> float:
    """Return the time once the device is done."""
    if device != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds(device: str, run: Callable[[], object]) -> float:
    """Return what a run takes."""
    start = waited(device)
    run()
    return waited(device) - start


def main() -> None:
    """Print a line."""
    device, *numbers = sys.argv[1:] or ["cpu"]
    count, steps, batch = (*map(int, numbers), *(16, 10, 4)[len(numbers) :])
    settings = CalibrationRecipe(prompts=count, steps=steps, batch=batch, guidance=4.0)
    recipe = Recipe(name="measured", calibration=settings)
    lines = (ASSETS / "prompts.txt").read_text(encoding="utf-8").split("\n")
    prompts = [lines[i % len(lines)] for i in range(count)]
    model = open_model(ASSETS / "pipeline")
    layers = {c.name: observed_layers(c, recipe) for c in model.components}
    batches = split_batches(prompts, settings)
    pipe = load_pipeline(model, torch.device(device))
    with ExitStack() as stack:
        observed = ObservedPipeline(
            model, layers, recipe, device, batches=len(batches), progress=silent, stack=stack
        )
        run_batch(pipe, batches[0], settings)
        observed.run(batches[0])
        # In turns: others on the machine slow both.
        turns = [
            (
                seconds(device, lambda part=part: run_batch(pipe, part, settings)),
                seconds(device, lambda part=part: observed.run(part)),
            )
            for part in batches
        ]
    plain, watched = map(sum, zip(*turns, strict=True))
    click.echo(
        f"{count} prompts, {steps} steps, batch {batch}, {device}: {plain:.2f} s drawn, "
        f"{watched:.2f} s calibrated, {watched / plain:.2f}"
    )


if __name__ == "__main__":
    main()
