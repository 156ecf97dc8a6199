"""``quantkit calibrate``: run a pipeline on prompts and store what its layers read, and merge."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar, say

if TYPE_CHECKING:
    from quantkit.workflow.calibrate import Calibrated, CalibrationPlan


@click.group()
def calibrate() -> None:
    """Take the statistics that static scales, smoothing and Wanda masks are chosen from."""


@calibrate.command("model")
@options.model
@options.recipe
@options.output
@options.prompts
@click.option(
    "--count",
    type=options.COUNT,
    help="Use the first so many prompts; default: all of --prompts, or the recipe's number.",
)
@click.option("--steps", type=options.STEPS, help="Denoising steps; default: the recipe's.")
@click.option("--guidance", type=options.NUMBER, help="Guidance scale; default: the recipe's.")
@click.option("--seed", type=options.SEED, help="Seed of the first prompt's noise.")
@click.option("--batch", type=options.COUNT, help="Prompts denoised at a time.")
@click.option("--resume", is_flag=True, help="Continue a run that was killed.")
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def model_command(
    model: str,
    recipe: str,
    output: Path,
    prompts: Path | None,
    count: int | None,
    steps: int | None,
    guidance: float | None,
    seed: int | None,
    batch: int | None,
    resume: bool,
    device: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run MODEL, a pipeline, on prompts and store statistics of its layers' inputs.

    They are kept per layer and timestep bucket: amax, a histogram, a sample of rows, and per
    channel amax, mean and mean square. Scales and masks are chosen from them later, without running
    the model again. Started by torchrun or accelerate, all processes share the prompts.
    """
    from quantkit.workflow.arguments import Sampling
    from quantkit.workflow.calibrate import calibrate, plan_calibration

    sampling = Sampling(count, steps, guidance, seed, batch)
    if dry_run:
        plan = plan_calibration(
            model,
            recipe=recipe,
            output=output,
            prompts=prompts,
            sampling=sampling,
            device=device,
            force=force,
        )
        if plan is not None:
            _print(plan, plan, f"{model}: would observe", as_json=as_json)
        return
    with progress_bar(quiet=quiet) as progress:
        found = calibrate(
            model,
            recipe=recipe,
            output=output,
            prompts=prompts,
            sampling=sampling,
            resume=resume,
            device=device,
            force=force,
            progress=progress,
            tell=say,
        )
    if found is not None:
        _print(found, found.plan, str(output), as_json=as_json)


@calibrate.command("merge")
@click.argument("calibrations", nargs=-1, required=True, type=options.PATH)
@options.output
@options.force
@options.as_json
def merge_command(calibrations: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Merge CALIBRATIONS of one model, as if one run had seen all their prompts.

    They must have the same layers, timestep buckets, steps and guidance, and be given in the order
    of their prompts. Prompt i starts from the seed plus i: pass each part a --seed of its own.
    """
    from quantkit.workflow.calibrate import merge_calibrations

    merged = merge_calibrations(calibrations, output=output, force=force)
    _print(merged, merged.plan, str(output), as_json=as_json)


def _print(
    found: "Calibrated | CalibrationPlan", plan: "CalibrationPlan", title: str, *, as_json: bool
) -> None:
    from quantkit.workflow.calibrate import Calibrated

    if as_json:
        print_json(found.to_json())
        return
    rows = [
        (name, len(layers), plan.prompts, plan.steps, plan.buckets)
        for name, layers in plan.layers.items()
    ]
    print_table("Observed", ("component", "layers", "prompts", "steps", "buckets"), rows)
    if isinstance(found, Calibrated) and found.unseen_told:
        echo(found.unseen_told)
    echo(title)
