"""``quantkit permute``: move channels, then choose the masks of what that made."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.cli.mask_table import error_budget, mask_method, pattern, print_masks
from quantkit.cli.recovery_options import masks_output

if TYPE_CHECKING:
    from quantkit.workflow.permute import Permuted


@click.command()
@options.model
@options.recipe
@options.calibration
@options.output
@pattern
@mask_method
@error_budget
@masks_output
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Seed of the search.")
@options.device
@options.force
@options.dry_run
@options.quiet
@options.as_json
def permute(
    model: str,
    recipe: str,
    calibration: Path | None,
    output: Path,
    pattern: str | None,
    method: str | None,
    error_budget: float | None,
    masks_output: Path | None,
    seed: int,
    device: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Reorder input channels of MODEL, at no cost, so that masks lose less.

    OUTPUT is a 16-bit directory that computes the same as MODEL; use it in all further commands.
    Its masks, and its calibration if one was given, are files beside it.
    """
    from quantkit.workflow.permute import permute

    with progress_bar(quiet=quiet) as progress:
        found = permute(
            model,
            output=output,
            recipe=recipe,
            calibration=calibration,
            masks_output=masks_output,
            pattern=pattern,
            method=method,
            error_budget=error_budget,
            device=device,
            seed=seed,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    print_permuted(found, as_json=as_json)


def print_permuted(found: "Permuted", *, as_json: bool) -> None:
    """Print what moved, what it gained, and what was written."""
    if as_json:
        print_json(found.to_json())
        return
    rows = [
        (
            ", ".join(layer.name for layer in permutation.coupling.consumers),
            f"{permutation.lost_before:.4f}",
            f"{permutation.lost_after:.4f}",
        )
        for permutation in found.permutations
    ]
    before, after = found.lost
    print_table("Permutations", ("input channels of", "lost before", "after"), rows)
    echo(f"{len(rows)} permutations: masks take {after:.4f} instead of {before:.4f} (mean)")
    if found.masks is None:
        echo("nothing written")
        return
    print_masks(found.masks, str(found.outputs.masks))
    for path in (found.outputs.pipeline, found.outputs.calibration):
        if path is not None:
            echo(f"written to {path}")
