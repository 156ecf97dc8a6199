"""``quantkit sparsify``: choose the n:m masks of a model and store them."""

from pathlib import Path
from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, progress_bar
from quantkit.cli.mask_table import print_masks


@click.command(
    cls=Command, example="quantkit sparsify sdxl -r fp8-sparse -c sdxl.calibration -o sdxl.masks"
)
@options.model
@options.recipe
@options.calibration
@options.hessians
@options.output
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
    hessians: Path | None, device: str | None, quiet: bool, as_json: bool, **given: Any
) -> None:
    """Choose which weights of MODEL are kept: n of every m along K, as 2 of 4.

    The recipe's sparsity section selects the layers, and a budget leaves out those that lose more.
    The error is the share of a layer's output power that is lost: estimated, from measured inputs
    where a calibration is given, or measured with --hessians.

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
        found = sparsify(**given, hessians=hessians, device=device or "auto", progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        print_masks(found.masks, str(found.output or "nothing written"))
        echo(*found.saving)
