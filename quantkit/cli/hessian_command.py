"""``quantkit calibrate hessian``: store the second moments of what layers read."""

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.storage.sizes import tell_bytes

if TYPE_CHECKING:
    from quantkit.workflow.hessians import MomentPlan, TakenMoments


@click.command(
    "hessian",
    cls=Command,
    example="quantkit calibrate hessian sdxl -r int4 --prompts captions.txt -o sdxl.hessians",
)
@options.model
@options.recipe
@options.output
@options.prompts
@options.count
@click.option(
    "--memory",
    type=options.FiniteRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    metavar="GIB",
    help="Memory for the matrices of one run; the prompts run as often as needed.",
)
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def hessian(quiet: bool, as_json: bool, **given: Any) -> None:
    """Run MODEL, a pipeline, on prompts and store the second moments of its layers' inputs.

    These are E[x x^T] and E[x], from which SparseGPT masks and GPTQ rounding are computed. Where
    the recipe rounds nothing but text encoders, prompts are encoded and not denoised. OUTPUT
    is a directory with a file per layer; a run that was killed continues where it stopped when it
    is started again.
    """
    from quantkit.workflow.hessians import calibrate_hessians

    with progress_bar(quiet=quiet) as progress:
        found = calibrate_hessians(**given, progress=progress)
    _print(found, as_json=as_json)


def _print(found: "MomentPlan | TakenMoments", *, as_json: bool) -> None:
    from quantkit.workflow.hessians import TakenMoments

    if as_json:
        print_json(found.to_json())
        return
    plan = found.plan if isinstance(found, TakenMoments) else found
    rows = [
        (name, len(moments.layers), tell_bytes(moments.nbytes), moments.groups)
        for name, moments in plan.components.items()
    ]
    print_table("Second moments", ("component", "layers", "size", "runs of the prompts"), rows)
    where = "nothing written"
    if isinstance(found, TakenMoments):
        where = f"written to {found.output}"
        if found.unseen_summary:
            echo(found.unseen_summary)
    echo(f"Second moments, {plan.weighting} weighting ({where})")
