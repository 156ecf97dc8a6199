"""The check that calibration and second moments serve a recipe, before a weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.errors import ArtefactError, RecipeError
from quantkit.models.component_layers import list_layers
from quantkit.models.layer_plan import plan_layers
from quantkit.numerics.masks import MASKS
from quantkit.packing.attention_plan import plan_attention
from quantkit.packing.component_inputs import Inputs
from quantkit.packing.unseen import keep_unseen, reads_statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration
    from quantkit.models.component_layers import Layer
    from quantkit.models.source import Component
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import MaskSet


def refuse_unfit(
    component: Component,
    recipe: Recipe,
    *,
    calibration: Calibration | None,
    masks: MaskSet | None,
    hessians: Hessians | None,
) -> None:
    """Refuse to pack a component whose recipe needs what was not observed; only headers are read.

    Raises:
        RecipeError: statistics or second moments that are not there, or of other buckets.
        ArtefactError: statistics, masks or second moments that lack layers or are of another model.
    """
    layers = list_layers(component)
    inputs = Inputs.of(component, recipe, calibration=calibration, masks=masks, hessians=hessians)
    calibrated = calibration is not None
    masked = inputs.masked(layers)
    planned = plan_layers(
        component, recipe, calibrated=calibrated, masked=masked, edges=inputs.edges
    )
    treatments = [t for t in keep_unseen(planned, inputs) if t.scheme is not None]
    _refuse_statistics([t.layer for t in treatments if reads_statistics(t, inputs)], inputs)
    _refuse_moments([t.layer for t in treatments if t.weight.rounding == "gptq"], inputs)
    rule = recipe.sparsity
    if masks is None and hessians is None and rule is not None and rule.method in MASKS:
        for treatment in treatments[:1]:
            inputs.mask_source(treatment.layer)
    seen = None if calibration is None else calibration.attention_of(component)
    plan_attention(component, recipe.attention, seen)


def _refuse_statistics(layers: Sequence[Layer], inputs: Inputs) -> None:
    """Refuse statistics that lack layers, or are of layers of other sizes."""
    if inputs.table is None:
        corrected = [layer.name for layer in layers if inputs.recipe.bias_correction and layer.bias]
        if corrected:
            raise RecipeError(
                f"{corrected[0]}: bias_correction needs statistics; {_cure('model', inputs)}, or "
                "drop it",
                fields=("calibration",),
            )
        return
    if missing := [layer.name for layer in layers if layer.name not in inputs.table]:
        raise ArtefactError(
            f"calibration: no statistics of {_counted(missing)}, which recipe "
            f"{inputs.recipe.name} needs; {_cure('model', inputs)}"
        )
    for layer in layers:
        channels = inputs.table[layer.name].channel_amax.shape[-1]
        if channels != layer.channels:
            raise ArtefactError(
                f"calibration: layer {layer.name}: {channels} input channels, expected "
                f"{layer.channels}; {_cure('model', inputs)}"
            )


def _refuse_moments(layers: Sequence[Layer], inputs: Inputs) -> None:
    """Refuse second moments that are not there, or lack layers that are rounded by GPTQ."""
    if not layers:
        return
    if inputs.hessians is None:
        raise RecipeError(
            f"{layers[0].name}: weight.rounding gptq needs second moments; "
            f"{_cure('hessian', inputs)}, or set weight.rounding: nearest",
            fields=("hessians",),
        )
    known = inputs.hessians.digests_of(inputs.component)
    if missing := [layer.name for layer in layers if layer.name not in known]:
        raise ArtefactError(
            f"hessians: no second moments of {_counted(missing)}, which recipe "
            f"{inputs.recipe.name} rounds by GPTQ; {_cure('hessian', inputs)}"
        )


def _counted(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} layers, the first is {names[0]}"


def _cure(what: str, inputs: Inputs) -> str:
    """Return the command that observes what is missing."""
    component = inputs.component
    model = component.path.parent if component.name else "PIPELINE"
    return f"run 'quantkit calibrate {what} {model} -r {inputs.recipe.name} -o OUTPUT' and give it"
