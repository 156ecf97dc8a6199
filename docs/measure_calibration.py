"""Time drawing pictures' latents with a pipeline, and calibrating it on the same prompts.

``python docs/measure_calibration.py [cpu|cuda [PROMPTS [STEPS [BATCH]]]]`` prints seconds of both,
loading aside, and their ratio, of the bundled pipeline; on a CPU, seconds of the process, so that
others on the same cores do not count. As many batches run at once as the command would run; all
have run before, so that recordings do not count. ``torchrun --nproc-per-node 2
docs/measure_calibration.py cuda 256 20`` shares the prompts between GPUs, and prints what the
slowest process took, and what joining took.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import torch

from quantkit.calibration.observing.collect import observed_layers
from quantkit.calibration.observing.observed_pipeline import ObservedPipeline
from quantkit.calibration.statistics.merge import Part, join_parts
from quantkit.models.source import open_model
from quantkit.pipelines.batches import Batch, GrowingBatches, split_batches
from quantkit.pipelines.processes import Processes, joined
from quantkit.pipelines.running import load_pipeline, run_batch
from quantkit.progress import silent
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.schema import Recipe

ASSETS = Path(__file__).parents[1] / "eval" / "assets"


def waited(device: str) -> float:
    """Return the time once the device is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(device: str, run: Callable[[], object]) -> float:
    """Return what a run takes."""
    start = waited(device)
    run()
    return waited(device) - start


def timed(
    settings: CalibrationRecipe, batches: Sequence[Batch], device: str, processes: Processes
) -> tuple[float, float, int, Part]:
    """Return seconds of drawing and of calibrating, batches at once, and what that gave."""
    recipe = Recipe(name="measured", calibration=settings)
    model = open_model(ASSETS / "pipeline")
    layers = {c.name: observed_layers(c, recipe) for c in model.components}
    pipe = load_pipeline(model, torch.device(device))
    with ExitStack() as stack:
        observed = ObservedPipeline(
            model, layers, recipe, device, batches=len(batches), progress=silent, stack=stack
        )
        growing = GrowingBatches(batches, torch.device(device), users=processes.on_a_device())
        ran = []
        while growing:
            with growing.next() as batch:
                run_batch(pipe, batch, settings)
                observed.run(batch)
                ran.append(batch)
        processes.exchange(None)
        plain = watched = 0.0
        for batch in ran:
            # In turns: others on the machine slow both.
            plain += seconds(device, partial(run_batch, pipe, batch, settings))
            watched += seconds(device, partial(observed.run, batch))
        return plain, watched, growing.count or 1, observed.taken().part()


def main() -> None:
    """Print a line."""
    device, *numbers = sys.argv[1:] or ["cpu"]
    count, steps, batch = (*map(int, numbers), *(16, 10, 4)[len(numbers) :])
    settings = CalibrationRecipe(prompts=count, steps=steps, batch=batch, guidance=4.0)
    lines = (ASSETS / "prompts.txt").read_text(encoding="utf-8").split("\n")
    batches = split_batches([lines[i % len(lines)] for i in range(count)], settings)
    with joined() as processes:
        share = [batches[i] for i in processes.share(len(batches))]
        *mine, part = timed(settings, share, processes.device(device), processes)
        plain, watched, at_once = map(max, zip(*processes.exchange(mine), strict=True))
        start = time.perf_counter()
        parts = processes.gather(part)
        if parts:
            join_parts(parts)
            click.echo(
                f"{count} prompts, {steps} steps, batch {batch}, {at_once:.0f} at once, "
                f"{processes.count} on {device}: "
                f"{plain:.2f} s drawn, {watched:.2f} s calibrated, {watched / plain:.2f}; "
                f"{time.perf_counter() - start:.2f} s joined"
            )


if __name__ == "__main__":
    main()
