"""A forecast of packing, without the statistics, moments or masks that it needs.

Only headers are read. Treatments and sizes follow from recipe and shapes, all but what statistics
decide: which layers an error budget masks, what ``smooth: auto`` leaves alone, which buckets agree,
and the scales of attention, some KB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.models.component_layers import list_layers
from quantkit.models.layer_plan import plan_layers
from quantkit.models.treated import others_of
from quantkit.numerics.masks import SPARSEGPT
from quantkit.packing.attention_plan import plan_attention
from quantkit.packing.pack_model import complete_plan, summarize
from quantkit.packing.plan import (
    ComponentPlan,
    assemble_plan,
    recipe_for_header,
    refuse_nothing,
)
from quantkit.packing.weight_plan import WeightPlan
from quantkit.packing.writer import PlannedLayer

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration
    from quantkit.models.source import Component, Model
    from quantkit.packing.summary import PackSummary
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import MaskSet


@dataclass(frozen=True)
class Forecast:
    """The output of packing, as far as it is known."""

    #: arguments of ``pack`` that the recipe needs besides what was given
    missing: tuple[str, ...]
    #: layers that an error budget decides of are dense here
    summary: PackSummary
    #: the same with all of them masked; None: no budget decides
    sparsest: PackSummary | None

    @property
    def outlook(self) -> str:
        """Layers and bytes; and with all masks of an error budget, in a second line."""
        if self.sparsest is None:
            return self.summary.counts
        most = self.sparsest
        return (
            f"{self.summary.counts}\nwith all {most.masked} layers masked that may be: {most.sizes}"
        )

    def __repr__(self) -> str:
        """Return what would be packed, and what is missing for it."""
        return f"{self.outlook}\nmissing: {', '.join(self.missing) or 'nothing'}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; timestep edges are not known, and left out."""
        values = self.summary.to_json()
        for entry in values["layers"]:
            if entry["scheme"] is not None:
                del entry["scheme"]["buckets"]
        most = None
        if self.sparsest is not None:
            most = {"layers": self.sparsest.masked, "bytes_after": self.sparsest.bytes_after}
        return {"missing": list(self.missing), "sparsest": most, **values}


def missing_artefacts(
    recipe: Recipe,
    *,
    calibration: Calibration | None,
    masks: MaskSet | None,
    hessians: Hessians | None,
) -> tuple[str, ...]:
    """Return the arguments of ``pack`` that the recipe needs and that are not given."""
    rule = None if masks is not None else recipe.sparsity
    rest = recipe.model_copy(update={"sparsity": None})
    wanda = rule is not None and rule.method == "wanda" and hessians is None
    moments = rest.needs_hessians or (rule is not None and rule.method == SPARSEGPT)
    needed = {
        "calibration": calibration is None and (wanda or rest.needs_calibration),
        "hessians": hessians is None and moments,
    }
    return tuple(name for name, lacking in needed.items() if lacking)


def forecast_pack(
    model: Model,
    recipe: Recipe,
    output: Path,
    *,
    missing: tuple[str, ...],
    masks: MaskSet | None = None,
) -> Forecast:
    """Return a forecast of packing once the missing artefacts exist.

    Args:
        model: the 16-bit source, of which headers are read.
        recipe: the recipe to apply.
        output: where it would go.
        missing: from ``missing_artefacts``.
        masks: of the model; without them the recipe's sparsity section decides.

    Raises:
        RecipeError: the recipe packs nothing, has a budget of treatments, or scales in more buckets
            than it calibrates.
        ModelError: a damaged header.
    """
    recipe.refuse_budget()
    others = others_of(model, recipe)

    def summary(*, budgeted: bool) -> PackSummary:
        plans = tuple(_foresee(c, recipe, masks, budgeted=budgeted) for c in model.components)
        plans += tuple(_foresee(c, own, None, budgeted=False) for c, own in others)
        return summarize(complete_plan(model, plans), output)

    rule = recipe.sparsity
    if masks is None and rule is not None and rule.error_budget is not None:
        return Forecast(missing, summary(budgeted=False), summary(budgeted=True))
    return Forecast(missing, summary(budgeted=True), None)


def _foresee(
    component: Component, recipe: Recipe, masks: MaskSet | None, *, budgeted: bool
) -> ComponentPlan:
    treatments = plan_layers(
        component,
        recipe,
        calibrated=True,
        masked=_masked(component, recipe, masks, budgeted=budgeted),
        edges=_supposed_edges(recipe),
    )
    refuse_nothing(component, recipe, treatments)
    packed = {
        t.layer.name: PlannedLayer(WeightPlan(t.layer.name, t.scheme, observer="amax"))
        for t in treatments
        if t.scheme is not None
    }
    told = recipe_for_header(recipe)
    attention = plan_attention(component, recipe.attention, None)
    return assemble_plan(component, recipe, treatments, packed, attention, smoothing={}, told=told)


def _masked(
    component: Component, recipe: Recipe, masks: MaskSet | None, *, budgeted: bool
) -> Collection[str]:
    if masks is not None:
        return masks.of(component)
    if not budgeted:
        return ()
    return [n.name for n in list_layers(component) if recipe.settings(n.name).sparse]


def _supposed_edges(recipe: Recipe) -> tuple[float, ...]:
    """Return edges as many as the recipe's own calibration would have: sizes need their number."""
    activations = (recipe.activation, *(o.activation for o in recipe.overrides if o.activation))
    named = {e for a in activations if isinstance(a.buckets, tuple) for e in a.buckets}
    if named:
        return tuple(sorted(named))
    return tuple(map(float, range(1, recipe.calibration.buckets)))
