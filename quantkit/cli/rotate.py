"""``quantkit rotate``: give queries and keys a basis in which attention can leave columns out."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.workflow.rotate import Rotated


@click.command()
@options.model
@options.calibration
@options.output
@options.prompts
@click.option(
    "--count",
    type=options.COUNT,
    default=32,
    show_default=True,
    help="Prompts to measure errors on, 32 or more, that the calibration was not taken from.",
)
@click.option(
    "--batch", type=options.COUNT, default=4, show_default=True, help="Prompts denoised at a time."
)
@options.device
@options.force
@options.quiet
@options.as_json
def rotate(
    model: str,
    calibration: Path | None,
    output: Path,
    prompts: Path | None,
    count: int,
    batch: int,
    device: str,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Give queries and keys of MODEL a basis, so that attention can multiply fewer columns.

    OUTPUT is a 16-bit pipeline that computes the same as MODEL up to rounding; use it in all
    further commands, with the calibration beside it: recipes with attention.sparse_k choose by the
    errors in it how many columns of each module are multiplied.
    """
    from quantkit.errors import InputError
    from quantkit.workflow.rotate import rotate

    if calibration is None:
        raise InputError(
            "rotate: no calibration, which the basis is made from; run 'quantkit calibrate model'",
            fields=("calibration",),
        )
    with progress_bar(quiet=quiet) as progress:
        found = rotate(
            model,
            calibration=calibration,
            output=output,
            prompts=prompts,
            count=count,
            batch=batch,
            device=device,
            force=force,
            progress=progress,
        )
    print_rotated(found, as_json=as_json)


def print_rotated(found: "Rotated", *, as_json: bool) -> None:
    """Print errors by module, why others have no basis, and what was written."""
    if as_json:
        print_json(found.to_json())
        return
    names = sorted({name for errors in found.errors.values() for name in errors})
    rows = [
        (module, *(f"{errors[name]:.4f}" if name in errors else "" for name in names))
        for module, errors in found.errors.items()
    ]
    print_table("Relative error of attention", ("attention module", *names), rows)
    for reason in sorted(set(found.rotation.left.values())):
        count = list(found.rotation.left.values()).count(reason)
        echo(f"{count} modules keep their basis: {reason}")
    echo(f"written to {found.outputs.pipeline}")
    echo(f"written to {found.outputs.calibration}")
