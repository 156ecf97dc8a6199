"""``smooth: auto``: SmoothQuant's strength of every layer, by the error of its output."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from quantkit.calibration.observers import static_scale
from quantkit.calibration.rescaled_statistics import refuse_without_samples
from quantkit.calibration.smoothing import Smoothing, input_factor
from quantkit.calibration.statistics import LayerStatistics, per_column
from quantkit.checkpoint.weight_reader import SourceTensor
from quantkit.models.layer_plan import LayerPlan
from quantkit.models.layers import Layer
from quantkit.models.timestep import bucket_of
from quantkit.numerics.granularity import PerTensor
from quantkit.numerics.scales import cast, scale_of_amax
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.threads import one_torch_thread
from quantkit.numerics.weight_grid import WeightGrid
from quantkit.packing.inputs import Inputs
from quantkit.progress import Progress

#: What is tried; None is no smoothing, and wins ties. The useful range of the paper is 0.4 to 0.6.
ALPHAS = (None, 0.2, 0.35, 0.5, 0.65, 0.8)


def choose_strengths(
    treatments: Sequence[LayerPlan], inputs: Inputs, *, step: str, progress: Progress
) -> Mapping[str, float | None]:
    """Return the strength of each layer that a recipe with ``smooth: auto`` may smooth.

    The weight streams by in blocks; what is held is the layer's stored rows once per strength.

    Args:
        treatments: of the component.
        inputs: with statistics.
        step: what progress calls this.
        progress: told of layers done.

    Raises:
        ArtefactError: statistics without samples.
        NonFiniteError: NaN or Inf in a weight.
    """
    wanted = [t for t in treatments if t.scheme is not None and t.scheme.smooth]
    chosen: dict[str, float | None] = {}
    with one_torch_thread():
        for done, treatment in enumerate(wanted):
            assert treatment.scheme is not None
            progress(step, done, len(wanted))
            chosen[treatment.layer.name] = _best(treatment.layer, treatment.scheme, inputs)
    progress(step, len(wanted), len(wanted))
    return chosen


@dataclass(frozen=True, eq=False)
class _Candidate:
    """One strength: what the input becomes, and how the weight is scaled."""

    #: (K,)
    columns: Tensor
    #: (S, K) rows after quantization, the factor undone
    rows: Tensor
    #: of the weight where one scale serves all of it
    tensor_scale: Tensor


def _best(layer: Layer, scheme: Scheme, inputs: Inputs) -> float | None:
    statistics = inputs.statistics(layer)
    refuse_without_samples(statistics, f"{layer.name}: smooth auto")
    descriptor = os.open(layer.shard, os.O_RDONLY)
    try:
        source = SourceTensor(layer.shard, descriptor, layer.weight)
        columns = reduce(torch.maximum, (rows.abs().amax(dim=0) for _, rows in source.blocks()))
        rows, buckets = _stored_rows(statistics)
        candidates = [
            _candidate(
                Smoothing(alpha, inputs.boundaries.get(layer.name)),
                (layer, scheme, inputs),
                columns,
                rows,
                buckets,
            )
            for alpha in ALPHAS
        ]
        errors = _output_errors(source, candidates, rows, (layer, scheme, inputs))
    finally:
        os.close(descriptor)
    # A factor that overflows makes an error that is no number. argmin takes the first of equals.
    return ALPHAS[int(errors.nan_to_num(nan=torch.inf).argmin())]


#: A layer, its treatment, and what is known besides.
_Case = tuple[Layer, Scheme, Inputs]


def _stored_rows(statistics: LayerStatistics) -> tuple[Tensor, Tensor]:
    """Return the rows of all buckets, float32 (S, K), and the bucket of each, int64 (S,)."""
    assert statistics.samples is not None
    assert statistics.sample_count is not None
    counts = statistics.sample_count.tolist()
    rows = [x[:known] for x, known in zip(statistics.samples, counts, strict=True)]
    buckets = torch.arange(len(counts)).repeat_interleave(statistics.sample_count)
    return torch.cat(rows).float(), buckets


def _candidate(
    smoothing: Smoothing, case: _Case, columns: Tensor, rows: Tensor, buckets: Tensor
) -> _Candidate:
    layer, scheme, inputs = case
    statistics, activation = inputs.statistics(layer), inputs.activation(layer, scheme)
    factor = input_factor(smoothing, statistics, columns, activation, scheme.input)
    wide = per_column(factor, layer.area)
    smoothed = rows * wide
    if scheme.activation is Activation.STATIC:
        scales = static_scale(statistics, activation, scheme.input, factor, edges=inputs.edges)
        starts = (float("-inf"), *inputs.edges)
        of_bucket = torch.tensor([bucket_of(start, scheme.buckets) for start in starts])
        scale = scales.reshape(-1)[of_bucket[buckets]].unsqueeze(1)
    else:
        scale = scale_of_amax(smoothed.abs().amax(dim=1, keepdim=True), scheme.input)
    quantized = cast(smoothed / scale, scheme.input).float() * scale / wide
    return _Candidate(wide, quantized, scale_of_amax((columns / wide).amax(), scheme.weight))


def _output_errors(
    source: SourceTensor, candidates: Sequence[_Candidate], rows: Tensor, case: _Case
) -> Tensor:
    """Return the squared error of the layer's outputs over the rows, float64, per candidate."""
    layer, scheme, inputs = case
    mask = None if scheme.sparsity is None else inputs.mask_source(layer)
    errors = torch.zeros(len(candidates), dtype=torch.float64)
    for first, block in source.blocks():
        weight = block if mask is None else block * mask(block, first)
        wanted = rows @ weight.T
        for index, candidate in enumerate(candidates):
            smoothed = weight / candidate.columns
            # The scales are those of amax, whatever the observer: its search would take 26 times
            # as long for every strength, and finds much the same fraction of amax for each.
            whole = isinstance(scheme.granularity, PerTensor)
            scale = candidate.tensor_scale if whole else None
            grid = WeightGrid.choose(smoothed, scheme, "amax", scale=scale)
            packed = grid.round(smoothed) * candidate.columns
            found = candidate.rows @ packed.T
            errors[index] += (found - wanted).square().sum(dtype=torch.float64)
    return errors
