"""Layers whose role neither name nor shape tells: packed if their error is small.

A layer outside of the blocks of a model reads or writes the latent, embeds a condition, or is an
ordinary layer. Without statistics all of them stay in 16 bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.models.layer_plan import LayerPlan, is_judged
from quantkit.numerics.scheme import Activation
from quantkit.numerics.threads import one_torch_thread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quantkit.packing.component_inputs import Inputs

#: Share of its output's power that a doubtful layer may lose. FP8 takes 0.0011 of numbers that are
#: spread evenly, half by the weight and half by the input: three bits of mantissa leave a step of
#: 1/8 in [1, 2), and 1/8**2 / 12 of a mean square of 7/3. int4 takes 0.01 and more.
MOST_LOST = 0.005


def judge_doubtful(
    treatments: Sequence[LayerPlan], smoothing: Mapping[str, float], inputs: Inputs
) -> tuple[LayerPlan, ...]:
    """Return the plans, with doubtful layers of too large an error kept in 16 bit.

    Args:
        treatments: of the component.
        smoothing: of the layers whose input is rescaled.
        inputs: with statistics, where a doubtful layer is packed.

    Raises:
        NonFiniteError: NaN or Inf in a weight.
    """
    return tuple(_judged(t, smoothing.get(t.layer.name), inputs) for t in treatments)


def _judged(treatment: LayerPlan, alpha: float | None, inputs: Inputs) -> LayerPlan:
    layer, scheme = treatment.layer, treatment.scheme
    family, recipe = inputs.component.family, inputs.recipe
    if scheme is None or not is_judged(layer, family, recipe):
        return treatment
    if scheme.activation is Activation.NONE:
        return treatment
    known = None if inputs.table is None else inputs.table.get(layer.name)
    kept = replace(treatment, scheme=None)
    if known is None:
        return replace(kept, reason=family.keep_reason(layer.name, layer.shape) or "")
    from quantkit.packing.output_error import Candidate, output_errors

    candidate = Candidate(scheme, alpha)
    with one_torch_thread():
        errors = output_errors(layer, (candidate,), inputs)
    lost = float(errors.squares[0]) / errors.power if errors.power else 0.0
    if lost <= MOST_LOST:
        return treatment
    return replace(
        kept,
        reason=f"the output loses {lost:.1g} of its power in {scheme.weight.name}: "
        f"of a layer outside of the blocks {MOST_LOST:g} may be lost",
    )
