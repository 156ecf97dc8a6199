"""Sources of a layer's mask while packing: a mask file, or choosing it on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from quantkit.errors import RecipeError
from quantkit.numerics.masks import MASKS, TWO_OF_FOUR, choose_mask

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration
    from quantkit.models.source import Model
    from quantkit.progress import Progress
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import LayerMask, MaskSet


def refuse_bare_masks(masks: MaskSet | None, recipe: Recipe) -> None:
    """Refuse masks whose kept weights have yet to be updated where nothing would update them.

    Raises:
        RecipeError: masks by sparsegpt, and codes rounded to the nearest.
    """
    if masks is not None and masks.counts_on_updates and recipe.weight.rounding != "gptq":
        raise RecipeError(
            "masks: chosen by sparsegpt, which updates the kept weights too; set "
            "weight.rounding: gptq and give second moments, or recover with method obs first",
            fields=("hessians",),
        )


def masks_beforehand(
    model: Model,
    recipe: Recipe,
    calibration: Calibration | None,
    hessians: Hessians | None,
    *,
    progress: Progress,
) -> MaskSet | None:
    """Return the masks that are chosen before packing: within a budget, or with second moments.

    Others (None) are chosen block by block while packing, and never held.
    """
    rule = recipe.sparsity
    if rule is None:
        return None
    if hessians is None and rule.error_budget is None and rule.method in MASKS:
        return None
    import torch

    from quantkit.sparsity.choose import choose_masks
    from quantkit.sparsity.sparsegpt import Surgeon

    surgeon = None if hessians is None else Surgeon(hessians, torch.device("cpu"))
    gptq = recipe.weight.rounding == "gptq"
    return choose_masks(model, recipe, calibration, surgeon=surgeon, update=gptq, progress=progress)


def stored_mask(mask: LayerMask, rows: Tensor, first: int) -> Tensor:
    """Return the stored mask of a block of rows, of which ``first`` is the index of the first."""
    block = replace(mask, bits=mask.bits[first : first + len(rows)])
    return block.dense(*rows.shape)


@dataclass(frozen=True, eq=False)
class ChosenMask:
    """A mask that a method chooses for a block of rows, wherever it is."""

    #: a key of ``MASKS``
    method: str
    #: E[x^2] of each column (K,), where it is known
    moment: Tensor | None

    def __call__(self, rows: Tensor, first: int) -> Tensor:
        """Return the mask of rows (R, K)."""
        del first
        return choose_mask(MASKS[self.method](rows, self.moment), TWO_OF_FOUR)

    @cached_property
    def importance(self) -> Tensor | None:
        """The factor of each column's |w|, float32 (K,); None: no factor, or not known."""
        if self.method != "wanda" or self.moment is None:
            return None
        return self.moment.float().sqrt().contiguous()
