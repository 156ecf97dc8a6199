"""Attention on codes: factors whose products are scores in powers of two, and codes of q, k and v.

For a head with queries q and keys k, softmax(scale q k') is that of (a q) (b (k - mean))' in powers
of two when a b = scale log2(e): a and b spend the range of the format evenly, and the mean of the
keys shifts all scores of a query alike, which softmax does not see. The mean of the values comes
back at the end, because probabilities sum to one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.numerics.attention_scales import AttentionScales, scales_of_ranges
from quantkit.numerics.formats import E4M3FN, INT8, find_format
from quantkit.numerics.scales import cast, scale_of_amax

#: Columns of a head that one matrix instruction takes.
COLUMNS = 16
#: Keys that share a scale, where codes are int8.
KEYS = 16
#: Keys of v are stored in runs of so many bytes.
RUN = 16
#: What q and k may be.
QK_FORMATS = (E4M3FN.name, INT8.name)


@dataclass(frozen=True, eq=False)
class AttentionCodes:
    """What the product reads, of N heads with M queries, K keys, D columns (padded to 16).

    uint8 codes; scales are float32.
    """

    #: (N, M, D)
    q: Tensor
    #: (N, K, D)
    k: Tensor
    #: (N, D, pitch), e4m3fn, transposed: pitch is K up to a multiple of 16, the rest zero
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
    scales: AttentionScales | None = None,
) -> AttentionCodes:
    """Return codes.

    Args:
        q: (N, M, D) of any float dtype, N heads of all pictures.
        k: (N, K, D).
        v: (N, K, D).
        scale: of q k'; None: 1 / sqrt(D).
        qk_format: e4m3fn or int8.
        scales: of the S heads of a picture, row n has n % S; None: of these very numbers.
    """
    tau = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * math.log2(math.e)
    q, k, v = (_with_columns(t.float()) for t in (q, k, v))
    scales = measured_scales(q, k, v) if scales is None else _with_padding(scales)
    copies = len(q) // scales.heads
    k = k - scales.key_mean.repeat(copies, 1).unsqueeze(1)
    v = v - scales.value_mean.repeat(copies, 1).unsqueeze(1)
    v = v / scales.value_scale.repeat(copies, 1).unsqueeze(1)
    codes = _codes(v.transpose(1, 2), E4M3FN.name)
    values = pad(codes, (0, padded(v.shape[1], RUN) - v.shape[1]))
    if qk_format == INT8.name:
        (qc, q_scale), (kc, k_scale) = _int8_rows(q * tau, 1), _int8_rows(k, KEYS)
        return AttentionCodes(
            qc, kc, values, q_scale, k_scale, scales.value_scale, scales.value_mean, qk_format
        )
    factors = unit_factors(scales.query_range, scales.key_range, tau)
    a, b = (factor.repeat(copies).reshape(-1, 1, 1) for factor in factors)
    qc, kc = _codes(q * a, E4M3FN.name), _codes(k * b, E4M3FN.name)
    return AttentionCodes(
        qc, kc, values, None, None, scales.value_scale, scales.value_mean, qk_format
    )


def measured_scales(q: Tensor, k: Tensor, v: Tensor) -> AttentionScales:
    """Return the scales of these very numbers, of heads (N, M, D) and (N, K, D) in float32."""
    k_mean, v_mean = k.mean(dim=1), v.mean(dim=1)
    ranges = ((k - k_mean.unsqueeze(1)).abs(), (v - v_mean.unsqueeze(1)).abs())
    return scales_of_ranges(
        q=q.abs().amax(dim=(1, 2)),
        k=ranges[0].amax(dim=(1, 2)),
        k_mean=k_mean,
        v=ranges[1].amax(dim=1),
        v_mean=v_mean,
        margin=1,
    )


def _with_padding(scales: AttentionScales) -> AttentionScales:
    by_column = (_with_columns(scales.key_mean), _with_columns(scales.value_scale, 1))
    return AttentionScales(
        scales.query_range, scales.key_range, *by_column, _with_columns(scales.value_mean)
    )


def _with_columns(t: Tensor, value: float = 0) -> Tensor:
    return pad(t, (0, padded(t.shape[-1]) - t.shape[-1]), value=value)


def unit_factors(q_range: Tensor, k_range: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return a and b with a b = tau, which bring q and k to the same size where the format allows.

    Args:
        q_range: of each head, float32, positive.
        k_range: likewise, of the keys without their mean.
        tau: what a product is multiplied by, positive.
    """
    largest = E4M3FN.max
    a = torch.minimum((tau * k_range / q_range).sqrt(), largest / q_range)
    b = torch.minimum(tau / a, largest / k_range)
    return a, b


def _codes(t: Tensor, fmt: str) -> Tensor:
    return cast(t, find_format(fmt)).view(torch.uint8)


def _int8_rows(t: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes of (N, R, D) and the scales (N, R / group up) of groups of rows."""
    n, rows, columns = t.shape
    groups = pad(t, (0, 0, 0, padded(rows, group) - rows)).reshape(n, -1, group * columns)
    scale = scale_of_amax(groups.abs().amax(dim=2), INT8)
    codes = _codes(t / scale.repeat_interleave(group, dim=1)[:, :rows, None], INT8.name)
    return codes, scale
