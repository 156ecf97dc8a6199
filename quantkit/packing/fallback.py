"""``weight.fallback``: layers with less error in a float format than in an integer one.

Steps of int8 are of equal size, so one channel far above the rest leaves few of them to the others;
steps of FP8 grow with the number. Smoothing moves most such channels into the weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.numerics.formats import find_format
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.threads import one_torch_thread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quantkit.models.layer_plan import LayerPlan
    from quantkit.packing.component_inputs import Inputs
    from quantkit.packing.output_error import OutputErrors
    from quantkit.progress import Progress


def choose_formats(
    treatments: Sequence[LayerPlan],
    smoothing: Mapping[str, float],
    inputs: Inputs,
    *,
    step: str,
    progress: Progress,
) -> tuple[LayerPlan, ...]:
    """Return the plans, with the fallback format for layers whose output error is less in it.

    Weights are compared in 8 bits also where they are to have four: those lose more than any input,
    and cannot tell what is better for it.

    Args:
        treatments: of the component.
        smoothing: of the layers whose input is rescaled as an integer.
        inputs: with statistics, where a layer has a fallback.
        step: what progress calls this.
        progress: told of layers done.

    Raises:
        ArtefactError: statistics without samples.
        NonFiniteError: NaN or Inf in a weight.
    """
    expected = [t for t in treatments if _may_fall_back(t)]
    chosen: dict[str, LayerPlan] = {}
    for done, treatment in enumerate(expected):
        progress(step, done, len(expected))
        name = treatment.layer.name
        with one_torch_thread():
            chosen[name] = _nearer(treatment, smoothing.get(name), inputs)
    if expected:
        progress(step, len(expected), len(expected))
    return tuple(chosen.get(t.layer.name, t) for t in treatments)


def fell_back(treatment: LayerPlan) -> bool:
    """Return whether a layer has its fallback."""
    scheme = treatment.scheme
    return scheme is not None and scheme.weight.name == treatment.weight.fallback


def _may_fall_back(treatment: LayerPlan) -> bool:
    scheme = treatment.scheme
    if scheme is None or treatment.weight.fallback is None:
        return False
    return scheme.weight.is_integer and scheme.activation is not Activation.NONE


def _nearer(treatment: LayerPlan, alpha: float | None, inputs: Inputs) -> LayerPlan:
    from quantkit.packing.output_error import Candidate, output_errors

    layer, scheme = treatment.layer, treatment.scheme
    assert scheme is not None
    assert treatment.weight.fallback is not None
    integer = replace(scheme, weight=scheme.weight.byte_format)
    other = replace(scheme, weight=find_format(treatment.weight.fallback), smooth=False)
    candidates = (Candidate(integer, alpha), Candidate(other, None))
    errors = output_errors(layer, candidates, inputs)
    as_integer, as_float = errors.squares.tolist()
    if as_integer <= as_float:
        return treatment
    return replace(treatment, scheme=other, reason=_reason(integer, other, errors))


def _reason(integer: Scheme, other: Scheme, errors: OutputErrors) -> str:
    # Rounded, so that layers of much the same losses stand in one line of the summary.
    lost = [f"{share:.1g}" for share in (errors.squares / errors.power).tolist()]
    return (
        f"{other.weight.name}: the output loses {lost[1]} of its power, "
        f"in {integer.weight.name} {lost[0]}"
    )
