"""Layers that calibration observed and no prompt called, such as GLIGEN's fusers without boxes.

Their inputs are unknown. They are packed where no statistics are needed, else kept in 16 bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.models.layer_plan import UNSEEN
from quantkit.numerics.scheme import Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.models.component_layers import Layer
    from quantkit.models.layer_plan import LayerPlan
    from quantkit.packing.component_inputs import Inputs
    from quantkit.recipe.schema import Recipe


def keep_unseen(treatments: Sequence[LayerPlan], inputs: Inputs) -> tuple[LayerPlan, ...]:
    """Return the plans, with layers kept in 16 bit that need statistics and have none.

    Args:
        treatments: of the component.
        inputs: with or without statistics and second moments.

    Raises:
        ArtefactError: a damaged file of second moments.
    """
    return tuple(
        replace(t, scheme=None, reason=UNSEEN) if _lacks_inputs(t, inputs) else t
        for t in treatments
    )


def _lacks_inputs(treatment: LayerPlan, inputs: Inputs) -> bool:
    if treatment.scheme is None:
        return False
    layer, moments = treatment.layer, inputs.hessians
    if layer.name in inputs.unseen and reads_statistics(treatment, inputs):
        return True
    rounds = treatment.weight.rounding == "gptq" and moments is not None
    return rounds and _has_no_rows(layer, inputs)


def reads_statistics(treatment: LayerPlan, inputs: Inputs) -> bool:
    """Return whether a layer that is packed needs statistics of its input."""
    scheme, recipe = treatment.scheme, inputs.recipe
    assert scheme is not None
    chooses_mask = scheme.sparsity is not None and inputs.masks is None
    corrected = recipe.bias_correction and treatment.layer.bias
    if chooses_mask or corrected or scheme.activation is Activation.STATIC:
        return True
    if scheme.smooth:
        return True
    return scheme.activation is not Activation.NONE and _is_risky(treatment, recipe)


def _is_risky(treatment: LayerPlan, recipe: Recipe) -> bool:
    """Return whether inputs become integers, or may, an explicit choice where there is no data."""
    assert treatment.scheme is not None
    integer = treatment.scheme.weight.is_integer
    return integer and not (recipe.data_free and treatment.weight.fallback is None)


def _has_no_rows(layer: Layer, inputs: Inputs) -> bool:
    assert inputs.hessians is not None
    return inputs.hessians.is_unseen(inputs.component, layer)
