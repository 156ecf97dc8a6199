"""Scales and the cast to codes. dequantized = code * scale, everywhere.

Weights here are rows (N, K) in float32; see ``packing.to_rows``.
"""

import torch
from torch import Tensor

from quantkit.numerics.formats import NumberFormat, find_format
from quantkit.numerics.granularity import Granularity, PerChannel, PerTensor, scale_shape


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
    # No match: Dynamo of Python 3.10 has no handler for its bytecode.
    if isinstance(granularity, PerTensor):
        return scale
    if isinstance(granularity, PerChannel):
        return scale.reshape(-1, 1)
    return scale.reshape(-1, k // granularity.size).repeat_interleave(granularity.size, dim=1)


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
    shape = scale_shape(granularity, *rows.shape)
    return scale_of_amax(rows.reshape(*shape, -1).abs().amax(dim=-1), fmt)


def scale_of_amax(amax: Tensor, fmt: NumberFormat) -> Tensor:
    """Return amax / fmt.max in float32, and 1.0 where that is zero (nothing to scale)."""
    scale = amax.float() / fmt.max
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def power_of_two(scale: Tensor) -> Tensor:
    """Return the least powers of two, float32, that are not below positive scales."""
    mantissa, exponent = torch.frexp(scale.float())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
