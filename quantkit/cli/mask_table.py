"""Masks on the command line: how they are chosen, and what is said of them."""

from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_table

if TYPE_CHECKING:
    from quantkit.sparsity.maskfile import MaskSet

pattern = click.option("--pattern", metavar="N:M", help="As 2:4 (or 4:2); default: the recipe's.")
mask_method = click.option(
    "--method",
    type=click.Choice(["magnitude", "wanda", "sparsegpt"]),
    help="How weights are ranked; wanda needs a calibration or second moments, sparsegpt second "
    "moments. Default: the recipe's.",
)
error_budget = click.option(
    "--budget",
    "error_budget",
    type=options.FiniteRange(min=0, min_open=True),
    help="Mask only layers that lose at most this share of their output's power.",
)


def print_masks(masks: "MaskSet", where: str) -> None:
    """Print every decision; ``where`` says what became of them."""
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
