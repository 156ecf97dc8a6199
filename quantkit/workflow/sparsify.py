"""Choosing the masks of a model."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.models.source import Model
from quantkit.packing.dry_run import forecast_pack
from quantkit.progress import Progress, silent
from quantkit.recipe.load import change_recipe
from quantkit.recipe.recommended import DEFAULT
from quantkit.recipe.schema import Recipe
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import LayerMask, MaskSet, save_masks
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import check_file, refuse_overlap
from quantkit.storage.sizes import tell_bytes, tell_sizes
from quantkit.workflow.arguments import (
    CalibrationLike,
    HessiansLike,
    ModelLike,
    RecipeLike,
    as_calibration,
    as_path,
    opened,
    surgeon_of,
)

#: A smaller share of bytes saved is said to be hardly worth it.
_WORTHWHILE = 0.01
_SIZES = ("bytes_dense", "bytes_sparse")
#: The next budgets that are told, over the recipe's.
_NEXT = (1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Budget:
    """An error budget, and what its masks would give."""

    error_budget: float
    #: masked layers
    layers: int
    #: of the packed denoisers
    nbytes: int

    def __str__(self) -> str:
        return f"{self.error_budget:.3g}: {self.layers} layers, {tell_bytes(self.nbytes)}"


@dataclass(frozen=True, eq=False)
class Sparsified:
    """Masks, and where they were written."""

    masks: MaskSet
    #: None: nowhere
    output: Path | None
    #: of the denoisers, packed by the recipe without and with the masks; None: not asked for
    sizes: tuple[int, int] | None = None
    #: the next ones that mask more layers
    budgets: tuple[Budget, ...] = ()

    @property
    def summary(self) -> str:
        """The number of masked layers, in a line."""
        decisions = self.masks.decisions
        chosen = [d.error for d in decisions if d.chosen and d.error is not None]
        mean = f", mean error {sum(chosen) / len(chosen):.4f}" if chosen else ""
        return (
            f"{self.masks.pattern} by {self.masks.method}: {len(chosen)} of {len(decisions)} "
            f"layers masked{mean}"
        )

    def __repr__(self) -> str:
        """Return how many layers are masked, in two lines, and what that saves."""
        return "\n".join([self.summary, f"written: {self.output or 'nothing'}", *self.saving])

    @property
    def saving(self) -> tuple[str, ...]:
        """The bytes that the masks save; next budgets; a warning where it is hardly worth it."""
        if self.sizes is None:
            return ()
        before, after = self.sizes
        told = [f"packed by the recipe: {tell_sizes(before, after)}"]
        if self.budgets:
            told.append(f"with sparsity.error_budget {'; '.join(map(str, self.budgets))}")
        if before - after < _WORTHWHILE * before:
            told.append("under 1 % is saved: raise sparsity.error_budget, or pack without masks")
        return tuple(told)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, every layer's decision included."""
        sizes = {} if self.sizes is None else dict(zip(_SIZES, self.sizes, strict=True))
        budgets = {"next_budgets": [asdict(budget) for budget in self.budgets]}
        return {**masks_to_json(self.masks, self.output), **sizes, **budgets}


def masks_to_json(masks: MaskSet, written: Path | None) -> dict[str, Any]:
    """Return JSON values of the decisions, and of the output if there is one."""
    return {
        "written": None if written is None else str(written),
        "method": masks.method,
        "pattern": str(masks.pattern),
        "layers": [asdict(decision) for decision in masks.decisions],
    }


def sparsify(
    model: ModelLike,
    *,
    recipe: RecipeLike = DEFAULT,
    output: str | Path | None = None,
    calibration: CalibrationLike | None = None,
    hessians: HessiansLike | None = None,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Sparsified:
    """Choose which weights of a model are kept: n of every m along K, as 2 of 4.

    Args:
        model: a directory, a hub id, or opened.
        recipe: whose sparsity section names the layers.
        output: the mask file to write; None: nothing is written.
        calibration: statistics of the model; errors count its inputs' mean squares.
        hessians: second moments of the model; errors are then the outputs' own, correlations
            between channels included.
        device: auto, cpu or cuda[:N]: where second moments are computed with.
        force: replace an existing file.
        dry_run: decide, and write nothing.
        progress: told of layers done.

    Returns:
        the masks and every layer's decision.

    Raises:
        InputError: a model, recipe, calibration or second moments that cannot be used or do not
            belong together, or an output that exists.
    """
    path = as_path(output)
    if path is not None:
        check_file(path, force=force)
    source, chosen = opened(model, recipe)
    if chosen.sparsity is None:
        chosen = change_recipe(chosen, {"sparsity": {}})
    chosen.refuse_budget()
    if path is not None:
        refuse_overlap(path, source.path)
    masks = choose_masks(
        source,
        chosen,
        as_calibration(calibration),
        surgeon=surgeon_of(hessians, device),
        update=hessians is not None and chosen.weight.rounding == "gptq",
        progress=progress,
    )
    written = None if dry_run else path
    if written is not None:
        write_or_keep(partial(save_masks, masks, force=force), written)
    return Sparsified(
        masks, written, _sizes(source, chosen, masks), _next_budgets(source, chosen, masks)
    )


def _sizes(model: Model, recipe: Recipe, masks: MaskSet) -> tuple[int, int]:
    """Return the bytes of the packed denoisers without and with masks, from headers."""
    none = replace(masks, layers={name: {} for name in masks.layers})
    return _size(model, recipe, none), _size(model, recipe, masks)


def _size(model: Model, recipe: Recipe, masks: MaskSet) -> int:
    return forecast_pack(model, recipe, Path("p"), missing=(), masks=masks).summary.bytes_after


def _next_budgets(model: Model, recipe: Recipe, masks: MaskSet) -> tuple[Budget, ...]:
    """Return the next budgets that mask more layers than the one before, from their errors."""
    rule = recipe.sparsity
    if rule is None or rule.error_budget is None:
        return ()
    found, most = list[Budget](), sum(decision.chosen for decision in masks.decisions)
    for times in _NEXT:
        budget = rule.error_budget * times
        more = _within(masks, budget)
        layers = sum(map(len, more.layers.values()))
        if layers > most:
            found.append(Budget(budget, layers, _size(model, recipe, more)))
            most = layers
    return tuple(found)


def _within(masks: MaskSet, budget: float) -> MaskSet:
    """Return the masks of a budget, without their bits: forecasts read none."""
    layers: dict[str, dict[str, LayerMask]] = {name: {} for name in masks.layers}
    for told in masks.decisions:
        if told.error is not None and told.error <= budget:
            bare = LayerMask(torch.empty(0, 0, dtype=torch.uint8), masks.pattern, "", told.error)
            layers[told.component][told.layer] = bare
    return replace(masks, layers=layers)
