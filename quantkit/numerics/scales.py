"""Scales and the cast to codes. dequantized = code * scale, everywhere.

Weights here are rows (N, K) in float32; see ``packing.to_rows``.
"""

import torch
from torch import Tensor

from quantkit.numerics.formats import NumberFormat, find_format
from quantkit.numerics.granularity import Granularity, PerChannel, PerGroup, PerTensor, scale_shape

#: Candidates of the MSE search, as fractions of the amax scale. Clipping deeper than half of amax
#: never won on Gaussian or Laplacian rows, and a code per octave has at most 8 steps to gain.
MSE_GRID = tuple(1.0 - 0.02 * i for i in range(26))


def cast(values: Tensor, fmt: NumberFormat) -> Tensor:
    """Round to the nearest code, ties to even; saturate.

    NaN stays NaN; integers have none, and give it the code below all others, which no number gets.

    Args:
        values: any shape, float32, already divided by the scale.

    Returns:
        the same shape in ``fmt.torch_dtype``.
    """
    clamped = values.clamp(fmt.min, fmt.max)
    if fmt.is_integer:
        # The conversion of NaN itself differs between devices.
        clamped = clamped.round().nan_to_num(nan=fmt.min - 1)
    return clamped.to(fmt.torch_dtype)


def decode(codes: Tensor, fmt: str, precision: torch.dtype = torch.float32) -> Tensor:
    """Return the values of uint8 ``codes`` of a format, exactly, in ``precision``."""
    return codes.contiguous().view(find_format(fmt).torch_dtype).to(precision)


def expand_scale(scale: Tensor, granularity: Granularity, k: int) -> Tensor:
    """Return the scale broadcastable against (N, K) rows."""
    match granularity:
        case PerTensor():
            return scale
        case PerChannel():
            return scale.reshape(-1, 1)
        case PerGroup(size):
            return scale.reshape(-1, k // size).repeat_interleave(size, dim=1)


def quantize(rows: Tensor, scale: Tensor, fmt: NumberFormat, granularity: Granularity) -> Tensor:
    """Return the codes of ``rows / scale`` (a true division: a reciprocal differs in the last bit).

    Args:
        rows: (N, K) float32.
        scale: float32, shape of ``granularity``.

    Returns:
        (N, K) codes in ``fmt.torch_dtype``.
    """
    return cast(rows / expand_scale(scale, granularity, rows.shape[1]), fmt)


def dequantize(codes: Tensor, scale: Tensor, granularity: Granularity) -> Tensor:
    """Return ``code * scale`` in float32, shape (N, K)."""
    return codes.float() * expand_scale(scale, granularity, codes.shape[1])


def amax_scale(rows: Tensor, fmt: NumberFormat, granularity: Granularity) -> Tensor:
    """Return the scale that maps each amax onto ``fmt.max``; 1.0 for all-zero groups.

    Args:
        rows: (N, K) float32, finite.

    Returns:
        float32 scale; [] , [N] or [N, K / G].

    Raises:
        ShapeError: K is not a multiple of the group size.

    Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    return scale_of_amax(_grouped(rows, granularity).abs().amax(dim=-1), fmt)


def scale_of_amax(amax: Tensor, fmt: NumberFormat) -> Tensor:
    """Return amax / fmt.max in float32, and 1.0 where that is zero (nothing to scale)."""
    scale = amax.float() / fmt.max
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def mse_scale(rows: Tensor, fmt: NumberFormat, granularity: Granularity) -> Tensor:
    """Return the scale of least squared error among ``MSE_GRID`` fractions of the amax scale.

    Args:
        rows: (N, K) float32, finite.

    Returns:
        float32 scale; [], [N] or [N, K / G]; the amax scale on ties.
    """
    groups = _grouped(rows, granularity)
    base = scale_of_amax(groups.abs().amax(dim=-1), fmt)
    best, best_error = base, torch.full_like(base, torch.inf)
    for fraction in MSE_GRID:
        scale = base * fraction
        error = _squared_error(groups, scale, fmt)
        better = error < best_error
        best, best_error = torch.where(better, scale, best), torch.where(better, error, best_error)
    return best


def _squared_error(groups: Tensor, scale: Tensor, fmt: NumberFormat) -> Tensor:
    wide = scale.unsqueeze(-1)
    return (cast(groups / wide, fmt).float() * wide - groups).square().sum(dim=-1)


def _grouped(rows: Tensor, granularity: Granularity) -> Tensor:
    """Return rows with the elements that share a scale on the last axis."""
    shape = scale_shape(granularity, *rows.shape)
    return rows.reshape(*shape, -1)


WEIGHT_SCALES = {"amax": amax_scale, "mse": mse_scale}
