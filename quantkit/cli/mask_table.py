"""What ``sparsify`` says of masks, and the recipe it takes them from."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.console import print_table

if TYPE_CHECKING:
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import MaskSet


def with_rule(recipe: "Recipe", rule: dict[str, Any]) -> "Recipe":
    """Return the recipe with settings of its sparsity section replaced."""
    from quantkit.recipe.fields import section_of
    from quantkit.recipe.schema import SparsityRecipe

    section = recipe.sparsity or SparsityRecipe()
    return recipe.model_copy(
        update={"sparsity": section_of(SparsityRecipe, {**dict(section), **rule})}
    )


def describe_masks(masks: "MaskSet", written: Path | None) -> dict[str, Any]:
    """Return JSON values that say what was decided, and where it was written if it was."""
    return {
        "written": None if written is None else str(written),
        "method": masks.method,
        "pattern": str(masks.pattern),
        "layers": [asdict(decision) for decision in masks.decisions],
    }


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
    title = f"{masks.pattern} by {masks.method}: {count} of {len(rows)} layers masked ({where})"
    print_table(title, ("layer", "error", "decision"), rows)
