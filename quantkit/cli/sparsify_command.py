"""``quantkit sparsify``: choose the n:m masks of a model and store them."""

from pathlib import Path

import click

from quantkit.cli import options
from quantkit.cli.console import print_json, progress_bar
from quantkit.cli.mask_table import error_budget, mask_method, pattern, print_masks


@click.command()
@options.model
@options.recipe
@options.calibration
@options.hessians
@options.output
@pattern
@mask_method
@error_budget
@click.option(
    "--update",
    is_flag=True,
    help="Report errors after an update of the kept weights, as 'quantkit recover --method obs' "
    "makes it; needs --hessians. With sparsegpt this is always so.",
)
@click.option(
    "--device",
    metavar="auto|cpu|cuda[:N]",
    help="Where second moments are used; default: auto.",
)
@options.force
@options.dry_run
@options.quiet
@options.as_json
def sparsify(
    model: str,
    recipe: str,
    calibration: Path | None,
    hessians: Path | None,
    output: Path,
    pattern: str | None,
    method: str | None,
    error_budget: float | None,
    update: bool,
    device: str | None,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Choose which weights of MODEL are kept: n of every m along K, as 2 of 4.

    The recipe's sparsity section selects the layers, and a budget leaves out those that lose more.
    The error is the share of a layer's output power that is lost. It is estimated for independent
    input channels, with their measured mean squares if a calibration is given.

    With --hessians the error is measured, including correlations between channels; with sparsegpt
    or --update it is the error after the update of the kept weights.

    OUTPUT is a mask file for 'quantkit pack --masks' and 'quantkit recover --masks'.
    """
    from quantkit.errors import RecipeError
    from quantkit.workflow.sparsify import sparsify

    if device is not None and hessians is None:
        raise RecipeError(
            "device: where second moments are used; give --hessians, or drop it",
            fields=("device",),
        )
    with progress_bar(quiet=quiet) as progress:
        found = sparsify(
            model,
            recipe=recipe,
            output=output,
            calibration=calibration,
            hessians=hessians,
            pattern=pattern,
            method=method,
            error_budget=error_budget,
            update=update,
            device="auto" if device is None else device,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    else:
        print_masks(found.masks, str(found.output or "nothing written"))
