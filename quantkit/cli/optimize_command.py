"""``quantkit calibrate optimize``: a treatment per layer within a budget, as a recipe."""

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.workflow.optimize import Optimized


@click.command(
    "optimize",
    cls=Command,
    example="quantkit calibrate optimize sensitivity.json --set budget.bytes=0.45 -o chosen.yaml",
)
@click.argument("sensitivity", metavar="SENSITIVITY", type=options.PATH)
@options.recipe
@options.output
@click.option("--model", metavar="MODEL", help="For a budget of SSIM: the pipeline.")
@options.calibration
@options.hessians
@options.prompts
@click.option(
    "--count", type=options.COUNT, default=8, show_default=True, help="Pictures per trial."
)
@options.device
@options.force
@options.quiet
@options.as_json
def optimize(quiet: bool, as_json: bool, **given: Any) -> None:
    """Choose a treatment for every layer of SENSITIVITY within the recipe's budget.

    The budget is one of bytes (share of the source's size), error (predicted NMSE of the final
    latents), speed (modelled, at least) and ssim (of pictures, at least): --set budget.bytes=0.3.
    Writes a recipe for 'quantkit sparsify' and 'quantkit pack', with the reason for every layer.
    A budget of SSIM needs --model and --calibration: it bisects on the predicted error and makes
    pictures for every trial.
    """
    from quantkit.workflow.optimize import optimize

    with progress_bar(quiet=quiet) as progress:
        found = optimize(**given, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def _print(found: "Optimized") -> None:
    losses: dict[str, list[float]] = {}
    for candidate in found.chosen.assignment.chosen:
        losses.setdefault(candidate.treatment, []).append(candidate.loss)
    rows = [(name, len(each), float(sum(each))) for name, each in sorted(losses.items())]
    if found.trials:
        trials = [(t.assignment.error, t.assignment.size, t.ssim) for t in found.trials]
        print_table("Trials", ("predicted error", "bytes", "SSIM"), trials)
    print_table("Chosen", ("treatment", "layers", "predicted error"), rows)
    echo(f"{found.output}: {found.chosen.summary}")
