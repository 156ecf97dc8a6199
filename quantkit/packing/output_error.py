"""Output errors of a layer with quantized weight and input, on stored rows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_statistics import LayerStatistics, per_column
from quantkit.calibration.statistics.observers import static_scale
from quantkit.calibration.statistics.smoothing import input_factor
from quantkit.checkpoint.weight_reader import SourceTensor
from quantkit.models.component_layers import Layer
from quantkit.models.timestep import bucket_of
from quantkit.numerics.granularity import PerTensor
from quantkit.numerics.scales import cast, scale_of_amax
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.weight_grid import WeightGrid
from quantkit.packing.component_inputs import Inputs
from quantkit.storage.system import open_to_read


@dataclass(frozen=True)
class Candidate:
    """One way to quantize a layer."""

    scheme: Scheme
    #: SmoothQuant's strength; None: none of it
    alpha: float | None


@dataclass(frozen=True, eq=False)
class OutputErrors:
    """The output errors of one layer's candidates, over its stored rows."""

    #: (candidates,) float64: squared errors; infinite where a factor overflows
    squares: Tensor
    #: squares of the output itself
    power: float


def output_errors(layer: Layer, candidates: Sequence[Candidate], inputs: Inputs) -> OutputErrors:
    """Return the errors of a layer's output over the rows that the calibration stored.

    The weight streams by in blocks; what is held is the stored rows once per candidate. Every code
    is the nearest one.

    Args:
        layer: any with statistics.
        candidates: at least one.
        inputs: with statistics.

    Raises:
        NonFiniteError: NaN or Inf in a weight.
    """
    statistics = inputs.statistics(layer)
    descriptor = open_to_read(layer.shard)
    try:
        source = SourceTensor(layer.shard, descriptor, layer.weight)
        columns = reduce(torch.maximum, (rows.abs().amax(dim=0) for _, rows in source.blocks()))
        rows, buckets = _stored_rows(statistics)
        tried = [_try(c, (layer, inputs), columns, rows, buckets) for c in candidates]
        return _measure(source, tried, rows, (layer, inputs))
    finally:
        os.close(descriptor)


@dataclass(frozen=True, eq=False)
class _Trial:
    """The quantized input of a candidate, and the factors of its weight."""

    scheme: Scheme
    #: (K,)
    columns: Tensor
    #: (S, K) rows after quantization, the factor undone
    rows: Tensor
    #: of the weight where one scale serves all of it
    tensor_scale: Tensor


def _stored_rows(statistics: LayerStatistics) -> tuple[Tensor, Tensor]:
    """Return the rows of all buckets, float32 (S, K), and the bucket of each, int64 (S,)."""
    counts = statistics.sample_count.tolist()
    rows = [x[:known] for x, known in zip(statistics.samples, counts, strict=True)]
    buckets = torch.arange(len(counts)).repeat_interleave(statistics.sample_count)
    return torch.cat(rows).float(), buckets


def _try(
    candidate: Candidate,
    case: tuple[Layer, Inputs],
    columns: Tensor,
    rows: Tensor,
    buckets: Tensor,
) -> _Trial:
    (layer, inputs), scheme = case, candidate.scheme
    statistics, activation = inputs.statistics(layer), inputs.activation(layer, scheme)
    factor = input_factor(candidate.alpha, statistics, columns)
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
    return _Trial(scheme, wide, quantized, scale_of_amax((columns / wide).amax(), scheme.weight))


def _measure(
    source: SourceTensor, trials: Sequence[_Trial], rows: Tensor, case: tuple[Layer, Inputs]
) -> OutputErrors:
    layer, inputs = case
    sparse = trials[0].scheme.sparsity is not None
    mask = inputs.mask_source(layer) if sparse else None
    errors, power = torch.zeros(len(trials), dtype=torch.float64), 0.0
    for first, block in source.blocks():
        weight = block if mask is None else block * mask(block, first)
        expected = rows @ weight.T
        power += float(expected.square().sum(dtype=torch.float64))
        for index, trial in enumerate(trials):
            found = trial.rows @ _rounded(weight, trial).T
            errors[index] += (found - expected).square().sum(dtype=torch.float64)
    return OutputErrors(errors.nan_to_num(nan=torch.inf), power)


def _rounded(weight: Tensor, trial: _Trial) -> Tensor:
    """Return rows (R, K) rounded to the nearest codes, dequantized."""
    smoothed = weight / trial.columns
    # The scales are those of amax, whatever the observer: its search would take 26 times as long
    # for every candidate, and finds much the same fraction of amax for each.
    whole = isinstance(trial.scheme.granularity, PerTensor)
    scale = trial.tensor_scale if whole else None
    grid = WeightGrid.choose(smoothed, trial.scheme, "amax", scale=scale)
    return grid.round(smoothed) * trial.columns
