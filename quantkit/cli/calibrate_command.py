"""``quantkit calibrate``: run a pipeline on prompts and store what its layers read, and merge."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.command import Group
from quantkit.cli.console import echo, print_json, print_table, progress_bar, say

if TYPE_CHECKING:
    from quantkit.workflow.calibrate import Calibrated, CalibrationPlan


@click.group(cls=Group)
def calibrate() -> None:
    """Take the statistics that static scales, smoothing and Wanda masks are chosen from."""


@calibrate.command(
    "model",
    example="quantkit calibrate model sdxl -r int8 --prompts captions.txt -o sdxl.calibration",
    kept=".{}.part-*",
)
@options.model
@options.recipe
@options.output
@options.prompts
@options.count
@click.option("--resume", is_flag=True, help="Continue a run that was killed.")
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def model_command(quiet: bool, as_json: bool, **given: Any) -> None:
    """Run MODEL, a pipeline, on prompts and store statistics of its layers' inputs.

    They are kept per layer and timestep bucket: amax, a histogram, a sample of rows, and per
    channel amax, mean and mean square. Scales and masks are chosen from them later, without running
    the model again. Started by torchrun or accelerate, all processes share the prompts.
    """
    from quantkit.workflow.calibrate import calibrate

    with progress_bar(quiet=quiet) as progress:
        found = calibrate(**given, progress=progress, tell=say)
    if found is not None:
        _print(found, as_json=as_json)


@calibrate.command("merge", example="quantkit calibrate merge first second -o sdxl.calibration")
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
    _print(merged, as_json=as_json)


def _print(found: "Calibrated | CalibrationPlan", *, as_json: bool) -> None:
    from quantkit.workflow.calibrate import Calibrated

    if as_json:
        print_json(found.to_json())
        return
    plan = found.plan if isinstance(found, Calibrated) else found
    rows = [
        (name, len(layers), plan.prompts, plan.steps, plan.buckets)
        for name, layers in plan.layers.items()
    ]
    print_table("Observed", ("component", "layers", "prompts", "steps", "buckets"), rows)
    if not isinstance(found, Calibrated):
        echo("nothing written")
        return
    if found.unseen_summary:
        echo(found.unseen_summary)
    echo(found.output)
