"""The table of masks."""

from typing import TYPE_CHECKING

from quantkit.cli.console import echo, print_table

if TYPE_CHECKING:
    from quantkit.sparsity.maskfile import MaskSet


def print_masks(masks: "MaskSet", where: str) -> None:
    """Print every decision; ``where`` is the place of the masks."""
    rows = [
        (
            "/".join(filter(None, (d.component, d.layer))),
            "" if d.error is None else f"{d.error:.4f}",
            "masked" if d.chosen else d.reason,
        )
        for d in masks.decisions
    ]
    count = sum(decision.chosen for decision in masks.decisions)
    print_table("Masks", ("layer", "error", "decision"), rows)
    echo(f"{masks.pattern} by {masks.method}: {count} of {len(rows)} layers masked ({where})")
