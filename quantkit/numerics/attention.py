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
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, qk_format: str = E4M3FN.name
) -> AttentionCodes:
    """Return codes with factors of these very numbers.

    Args:
        q: (N, M, D) of any float dtype, N heads of all pictures.
        k: (N, K, D).
        v: (N, K, D).
        scale: of q k'; None: 1 / sqrt(D).
        qk_format: e4m3fn or int8.
    """
    tau = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * math.log2(math.e)
    q, k, v = (pad(t.float(), (0, padded(t.shape[-1]) - t.shape[-1])) for t in (q, k, v))
    k = k - k.mean(dim=1, keepdim=True)
    mean = v.mean(dim=1)
    values, value_scale = _value_codes(v - mean.unsqueeze(1))
    if qk_format == INT8.name:
        qc, q_scale = _int8_rows(q * tau, 1)
        kc, k_scale = _int8_rows(k, KEYS)
        return AttentionCodes(qc, kc, values, q_scale, k_scale, value_scale, mean, qk_format)
    a, b = unit_factors(_amax(q), _amax(k), tau)
    qc, kc = _codes(q * a, E4M3FN.name), _codes(k * b, E4M3FN.name)
    return AttentionCodes(qc, kc, values, None, None, value_scale, mean, qk_format)


def unit_factors(q_amax: Tensor, k_amax: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return a and b with a b = tau, which bring q and k to the same size where the format allows.

    Args:
        q_amax: of each head, float32.
        k_amax: likewise, of the keys without their mean.
        tau: what a product is multiplied by, positive.
    """
    largest = E4M3FN.max
    one = torch.ones_like(q_amax)
    q_amax, k_amax = torch.where(q_amax > 0, q_amax, one), torch.where(k_amax > 0, k_amax, one)
    a = torch.minimum((tau * k_amax / q_amax).sqrt(), largest / q_amax)
    b = torch.minimum(tau / a, largest / k_amax)
    return a, b


def _amax(t: Tensor) -> Tensor:
    return t.abs().amax(dim=(1, 2), keepdim=True)


def _codes(t: Tensor, fmt: str) -> Tensor:
    return cast(t, find_format(fmt)).view(torch.uint8)


def _value_codes(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N, D, pitch) codes and (N, D) scales of (N, K, D) values."""
    scale = scale_of_amax(v.abs().amax(dim=1), E4M3FN)
    codes = _codes((v / scale.unsqueeze(1)).transpose(1, 2), E4M3FN.name)
    return pad(codes, (0, padded(v.shape[1], RUN) - v.shape[1])), scale


def _int8_rows(t: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes of (N, R, D) and the scales (N, R / group up) of groups of rows."""
    n, rows, columns = t.shape
    groups = pad(t, (0, 0, 0, padded(rows, group) - rows)).view(n, -1, group * columns)
    scale = scale_of_amax(groups.abs().amax(dim=2), INT8)
    codes = _codes(t / scale.repeat_interleave(group, dim=1)[:, :rows, None], INT8.name)
    return codes, scale
