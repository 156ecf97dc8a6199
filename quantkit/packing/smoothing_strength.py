"""``smooth: auto``: SmoothQuant's strength of every layer with the least output error."""

from collections.abc import Mapping, Sequence

from quantkit.models.component_layers import Layer
from quantkit.models.layer_plan import LayerPlan
from quantkit.numerics.scheme import Scheme
from quantkit.numerics.threads import one_torch_thread
from quantkit.packing.component_inputs import Inputs
from quantkit.packing.output_error import Candidate, output_errors
from quantkit.progress import Progress

#: What is tried; None is no smoothing, and wins ties. The useful range of the paper is 0.4 to 0.6.
ALPHAS = (None, 0.2, 0.35, 0.5, 0.65, 0.8)


def choose_strengths(
    treatments: Sequence[LayerPlan], inputs: Inputs, *, step: str, progress: Progress
) -> Mapping[str, float | None]:
    """Return the strength of each layer that a recipe with ``smooth: auto`` may smooth.

    Args:
        treatments: of the component.
        inputs: with statistics.
        step: what progress calls this.
        progress: told of layers done.

    Raises:
        ArtefactError: statistics without samples.
        NonFiniteError: NaN or Inf in a weight.
    """
    expected = [t for t in treatments if t.scheme is not None and t.scheme.smooth]
    chosen: dict[str, float | None] = {}
    with one_torch_thread():
        for done, treatment in enumerate(expected):
            assert treatment.scheme is not None
            progress(step, done, len(expected))
            chosen[treatment.layer.name] = _best(treatment.layer, treatment.scheme, inputs)
    progress(step, len(expected), len(expected))
    return chosen


def _best(layer: Layer, scheme: Scheme, inputs: Inputs) -> float | None:
    candidates = [Candidate(scheme, alpha) for alpha in ALPHAS]
    errors = output_errors(layer, candidates, inputs)
    # argmin takes the first of equals.
    return ALPHAS[int(errors.squares.argmin())]
