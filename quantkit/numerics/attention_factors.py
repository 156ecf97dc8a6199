"""Attention on codes: factors whose products are scores in powers of two, and codes of q, k and v.

For a head with queries q and keys k, softmax(scale q k') is that of (a q) (b (k - mean))' in powers
of two when a b = scale log2(e): a and b spend the range of the format evenly, and the mean of the
keys shifts all scores of a query by the same number, which softmax cancels. The mean of the values
comes back at the end, because probabilities sum to one.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.numerics import attention_limits
from quantkit.numerics.attention_scales import AttentionScales, scales_of_ranges
from quantkit.numerics.formats import E4M3FN, INT8, NumberFormat
from quantkit.numerics.scales import cast

#: Columns of a head that one matrix instruction takes.
COLUMNS = attention_limits.COLUMNS
#: Keys that share a scale, where codes are int8.
KEYS = 16
#: Keys of v are stored in runs of so many bytes.
RUN = 16


@dataclass(frozen=True, eq=False)
class AttentionCodes:
    """Operands of the attention kernel: N heads, M queries, K keys, D columns (padded to 16).

    uint8 codes, or float16; scales are float32.
    """

    #: (N, M, D)
    q: Tensor
    #: (N, K, D)
    k: Tensor
    #: (N, D, pitch), e4m3fn or float16, transposed: pitch is K up to a multiple of 16, the rest
    #: zero
    v: Tensor
    #: (N, M) and (N, K / 16 up), of int8 codes; None: products of codes are scores
    q_scale: Tensor | None
    k_scale: Tensor | None
    #: (N, D)
    v_scale: Tensor
    v_mean: Tensor
    qk_format: str


def padded(columns: int, multiple: int = COLUMNS) -> int:
    """Return the next multiple."""
    return -(-columns // multiple) * multiple


def attention_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    qk_format: str = E4M3FN.name,
    pv: str | None = E4M3FN.name,
    scales: AttentionScales | None = None,
) -> AttentionCodes:
    """Return codes.

    Args:
        q: (N, M, D) of any float dtype, N heads of all pictures.
        k: (N, K, D).
        v: (N, K, D).
        scale: of q k'; None: 1 / sqrt(D).
        qk_format: e4m3fn or int8.
        pv: of the values: e4m3fn; None: float16.
        scales: of the S heads of a picture, row n has n % S; None: of these very numbers.
    """
    tau = score_factor(q.shape[-1], scale)
    q, k, v = (_with_columns(t.float()) for t in (q, k, v))
    scales = measured_scales(q, k, v) if scales is None else with_padding(scales)
    values = value_codes(v, scales.value_mean, scales.value_scale, pv)
    if qk_format == INT8.name:
        one = torch.ones(scales.heads, device=q.device)
        qc, q_scale = int8_codes(q, None, tau * one, 1)
        kc, k_scale = int8_codes(k, scales.key_mean, one, KEYS)
        return AttentionCodes(
            qc, kc, values, q_scale, k_scale, scales.value_scale, scales.value_mean, qk_format
        )
    a, b = unit_factors(scales.query_range, scales.key_range, tau)
    qc, kc = e4m3fn_codes(q, None, a), e4m3fn_codes(k, scales.key_mean, b)
    return AttentionCodes(
        qc, kc, values, None, None, scales.value_scale, scales.value_mean, qk_format
    )


def codes_of_values(v: Tensor, scales: AttentionScales, pv: str | None) -> Tensor:
    """Return the values of ``AttentionCodes`` alone, of (N, K, D)."""
    wide = with_padding(scales)
    return value_codes(_with_columns(v.float()), wide.value_mean, wide.value_scale, pv)


def score_factor(columns: int, scale: float | None = None) -> float:
    """Return the factor that turns q k' into scores in powers of two.

    Args:
        columns: of a head, without padding.
        scale: of q k'; None: 1 / sqrt(columns).
    """
    return (1 / math.sqrt(columns) if scale is None else scale) * math.log2(math.e)


def measured_scales(q: Tensor, k: Tensor, v: Tensor) -> AttentionScales:
    """Return dynamic scales, measured on heads (N, M, D) and (N, K, D)."""
    (k_mean, k_range), (v_mean, v_range) = _spread(k), _spread(v)
    return scales_of_ranges(
        q=q.abs().amax(dim=(1, 2)),
        k=k_range.amax(dim=1),
        k_mean=k_mean,
        v=v_range,
        v_mean=v_mean,
        margin=1,
    )


def _spread(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each column of (N, T, D), and how far the farthest number is from it."""
    mean = t.mean(dim=1, dtype=torch.float32)
    low, high = (end.float() for end in torch.aminmax(t, dim=1))
    return mean, torch.maximum(high - mean, mean - low)


def with_padding(scales: AttentionScales) -> AttentionScales:
    """Return scales with columns up to a multiple of 16."""
    by_column = (_with_columns(scales.key_mean), _with_columns(scales.value_scale, 1))
    return AttentionScales(
        scales.query_range, scales.key_range, *by_column, _with_columns(scales.value_mean)
    )


def _with_columns(t: Tensor, value: float = 0) -> Tensor:
    return pad(t, (0, padded(t.shape[-1]) - t.shape[-1]), value=value)


class HeadFactors(NamedTuple):
    """Factors and means that quantize heads to codes, float32; D is a multiple of 16."""

    #: (H, D), taken off keys
    key_mean: Tensor
    #: (H,), of queries and of keys
    query: Tensor
    key: Tensor
    #: (H, D), taken off values, and of their codes
    value_mean: Tensor
    value_scale: Tensor


def head_factors(
    scales: AttentionScales, columns: int, qk_format: str, scale: float | None = None
) -> HeadFactors:
    """Return the factors and means that quantize heads.

    Args:
        scales: of the heads.
        columns: of a head, without padding.
        qk_format: e4m3fn or int8, whose scales are those of each call's numbers.
        scale: of q k'; None: 1 / sqrt(columns).
    """
    return factors_of_scales(scales, qk_format, score_factor(columns, scale))


def factors_of_scales(scales: AttentionScales, qk_format: str, tau: float) -> HeadFactors:
    """Return the same, of a factor ``tau`` of products."""
    wide = with_padding(scales)
    one = torch.ones_like(wide.query_range)
    q, k = (
        unit_factors(wide.query_range, wide.key_range, tau)
        if qk_format == E4M3FN.name
        else (tau * one, one)
    )
    return HeadFactors(wide.key_mean, q, k, wide.value_mean, wide.value_scale)


def unit_factors(q_range: Tensor, k_range: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return a and b with a b = tau, which bring q and k to the same size where the format allows.

    Args:
        q_range: of each head, float32, positive.
        k_range: of each head's keys without their mean, float32, positive.
        tau: what a product is multiplied by, positive.
    """
    largest = E4M3FN.max
    # torch's float32 root is not rounded to nearest on every CPU; that of float64 is near enough.
    even = (tau * k_range / q_range).double().sqrt().float()
    a = torch.minimum(even, largest / q_range)
    b = torch.minimum(tau / a, largest / k_range)
    return a, b


def e4m3fn_codes(t: Tensor, mean: Tensor | None, factor: Tensor) -> Tensor:
    """Return codes of ``(t - mean) * factor``, saturated; NaN stays NaN.

    Args:
        t: (N, R, D) float32.
        mean: (S, D) float32, row n of the heads has n % S; None: zeros.
        factor: (S,) float32, of each head.

    Returns:
        (N, R, D) uint8.
    """
    return _codes(_factored(t, mean, factor), E4M3FN)


def int8_codes(t: Tensor, mean: Tensor | None, factor: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes of ``(t - mean) * factor``, and the scales of groups of rows.

    Args:
        t: (N, R, D) float32.
        mean: (S, D) float32, row n of the heads has n % S; None: zeros.
        factor: (S,) float32, of each head.
        group: rows that share a scale, amax / 127 or 1.0 where that is 0.

    Returns:
        (N, R, D) uint8 and (N, R / group up) float32. NaN makes the scale of its group NaN.
    """
    values = _factored(t, mean, factor)
    n, rows, columns = values.shape
    groups = pad(values, (0, 0, 0, padded(rows, group) - rows)).reshape(n, -1, group * columns)
    amax = groups.abs().amax(dim=2)
    # By a tensor: a GPU multiplies by the reciprocal of a Python number, which rounds otherwise.
    scale = amax / torch.full_like(amax, INT8.max)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    by_row = scale.repeat_interleave(group, dim=1)[:, :rows, None]
    return _codes(values / by_row, INT8), scale


def value_codes(
    v: Tensor, mean: Tensor | None, scale: Tensor, pv: str | None = E4M3FN.name
) -> Tensor:
    """Return ``(v - mean) * (1 / scale)`` in e4m3fn or float16, saturated and transposed.

    NaN stays NaN.

    Args:
        v: (N, K, D) float32.
        mean: (S, D) float32, row n of the heads has n % S; None: zeros.
        scale: (S, D) float32, of each column. Its inverse is at most the largest number of float32.
        pv: e4m3fn; None: float16.

    Returns:
        (N, D, pitch) uint8 codes, or float16: pitch is K up to a multiple of 16, the rest zero.
    """
    inverse = (torch.ones_like(scale) / scale).clamp(max=torch.finfo(torch.float32).max)
    values = _centered(v, mean) * of_heads(inverse, len(v)).unsqueeze(1)
    values = values.transpose(1, 2)
    codes = in_float16(values) if pv is None else _codes(values, E4M3FN)
    return pad(codes, (0, padded(v.shape[1], RUN) - v.shape[1]))


def in_float16(t: Tensor) -> Tensor:
    """Return contiguous float16, saturated; NaN stays NaN."""
    largest = torch.finfo(torch.float16).max
    return t.clamp(-largest, largest).half().contiguous()


def cut_to_float16(t: Tensor) -> Tensor:
    """Return float16 of float32 from 0 on: the next number towards 0; NaN stays NaN."""
    nearest = t.half()
    above = (nearest.float() > t).short()
    return (nearest.view(torch.int16) - above).view(torch.float16)


def of_heads(numbers: Tensor, rows: int) -> Tensor:
    """Return the values of each of N rows of heads; row n has those of n % S."""
    return numbers.repeat(rows // len(numbers), *[1] * (numbers.ndim - 1))


def _factored(t: Tensor, mean: Tensor | None, factor: Tensor) -> Tensor:
    return _centered(t, mean) * of_heads(factor, len(t))[:, None, None]


def _centered(t: Tensor, mean: Tensor | None) -> Tensor:
    return t if mean is None else t - of_heads(mean, len(t)).unsqueeze(1)


def _codes(t: Tensor, fmt: NumberFormat) -> Tensor:
    """Return contiguous codes: a launch copies others, each time."""
    return cast(t, fmt).view(torch.uint8).contiguous()
