"""Errors of attention that multiplies codes of each format, in a running model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.ops.attention.coded_attention import attention
from quantkit.device.ops.attention.streams import ALIGNED
from quantkit.device.ops.call import call
from quantkit.device.ops.table import OPS, attention_for, name_for
from quantkit.models.attention_modules import Heads
from quantkit.numerics.attention_factors import (
    COLUMNS,
    KEYS,
    attention_codes,
    codes_of_values,
    head_factors,
    measured_scales,
    with_padding,
)
from quantkit.numerics.attention_formats import AttentionFormat
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.numerics.formats import INT8

#: Rows of q of every picture and call whose error is measured.
ROWS = 32


def rounded_attention(
    heads: Heads, scale: float | None, found: AttentionFormat, scales: AttentionScales | None
) -> Tensor:
    """Return attention as the kernels compute it: by them on a GPU, else in PyTorch.

    Args:
        heads: (B, H, N, D).
        scale: of q k'; None: 1 / sqrt(D).
        found: formats of the codes.
        scales: of the H heads, or of those of all pictures; None: of these very numbers.

    Returns:
        (B, H, N, D) float32.
    """
    return next(_rounded(heads, scale, (found,), scales))


def _rounded(
    heads: Heads,
    scale: float | None,
    formats: tuple[AttentionFormat, ...],
    scales: AttentionScales | None,
) -> Iterator[Tensor]:
    """Yield attention in each of the formats, of which several share codes."""
    _, count, keys, columns = heads.k.shape
    scales = _measured(heads) if scales is None else scales
    coded = _Coded(heads, scale, scales, kernels=_are_for_kernels(heads))
    wide = with_padding(scales)
    by_qk = {qk: coded.queries_and_keys(qk) for qk in dict.fromkeys(row.qk for row in formats)}
    values = {pv: coded.values(pv) for pv in dict.fromkeys(row.pv for row in formats)}
    for row in formats:
        compute = _computing(row, coded, keys)
        q, k, q_scale, k_scale = by_qk[row.qk]
        y = compute(
            q, k, values[row.pv], q_scale, k_scale, wide.value_scale, wide.value_mean,
            keys, count, columns, row.qk, torch.float32,
        )  # fmt: skip
        yield y.transpose(1, 2)


def _computing(row: AttentionFormat, coded: "_Coded", keys: int) -> Callable[..., Tensor]:
    """Return what computes attention of a format: a kernel, if there is one, or PyTorch."""
    if not coded.kernels:
        return attention
    op, q = OPS[attention_for(row.qk, row.pv)], coded.heads.q
    if row.pv is None and choose(op.name, q.device, k=COLUMNS).backend is Backend.REFERENCE:
        # Step by step it would be a dozen launches for every few keys.
        return partial(attention, tile=keys)
    return partial(call, op)


def _are_for_kernels(heads: Heads) -> bool:
    """Tell whether the kernels of a GPU take heads; a CPU's are slower than PyTorch."""
    return heads.q.is_cuda and heads.q.shape[3] % ALIGNED == 0


def _measured(heads: Heads) -> AttentionScales:
    return measured_scales(*(t.flatten(0, 1) for t in heads))


@dataclass(frozen=True, eq=False)
class _Coded:
    """Codes of heads, (B, H, N, D), made when they are asked for."""

    heads: Heads
    scale: float | None
    scales: AttentionScales
    #: by kernels
    kernels: bool

    def queries_and_keys(self, qk: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return codes of queries and of keys, and the scales of int8 ones."""
        q, k, v = self.heads
        if not self.kernels:
            # Of values one row: their codes are another matter.
            rows = (t.flatten(0, 1).float() for t in (q, k, v[:, :, :1]))
            made = attention_codes(*rows, scale=self.scale, qk_format=qk, scales=self.scales)
            return made.q, made.k, made.q_scale, made.k_scale
        factors = head_factors(self.scales, q.shape[3], qk, self.scale)
        sides = ((q, None, factors.query, 1), (k, factors.key_mean, factors.key, KEYS))
        (qc, *q_scale), (kc, *k_scale) = (
            _head_codes(qk, t, mean, factor, group) for t, mean, factor, group in sides
        )
        return qc, kc, *(q_scale or (None,)), *(k_scale or (None,))

    def values(self, pv: str | None) -> Tensor:
        """Return codes of values, or float16."""
        v = self.heads.v
        if not self.kernels:
            return codes_of_values(v.flatten(0, 1).float(), self.scales, pv)
        wide = with_padding(self.scales)
        op = OPS[name_for("value_codes", pv) if pv else "value_codes_f16"]
        numbers = (wide.value_mean, wide.value_scale)
        made: Tensor = call(op, _tokens(v), None, *numbers, 0, 0, *_sizes(v))
        return made


def _head_codes(
    qk: str, t: Tensor, mean: Tensor | None, factor: Tensor, group: int
) -> tuple[Tensor, ...]:
    """Return codes of heads, and scales of ``group`` rows of int8 ones."""
    last = (group,) if qk == INT8.name else ()
    found = call(
        OPS[name_for("head_codes", qk)], _tokens(t), None, None, None, None, None, mean, factor,
        0, 0, *_sizes(t), 0.0, "none", *last,
    )  # fmt: skip
    return found if isinstance(found, tuple) else (found,)


def _tokens(t: Tensor) -> Tensor:
    """Return heads side by side, (B, N, H D), as projections write them."""
    return t.transpose(1, 2).flatten(2)


def _sizes(t: Tensor) -> tuple[int, int]:
    return t.shape[1], t.shape[3]


def lost_power(
    heads: Heads,
    scale: float | None,
    formats: tuple[AttentionFormat, ...],
    scales: AttentionScales | None,
) -> tuple[Tensor, Tensor]:
    """Return what formats change in the outputs of 32 rows of q, evenly spread, in sums of squares.

    Args:
        heads: (B, H, N, D).
        scale: of q k'; None: 1 / sqrt(D).
        formats: F of them.
        scales: static ones; None: of all of these numbers.

    Returns:
        (F, H) of the differences and (H,) of the outputs, float64.
    """
    q, k, v = (t.detach() for t in heads)
    scales = _measured(Heads(q, k, v)) if scales is None else scales
    queries, columns = q.shape[2:]
    rows = min(ROWS, queries)
    # Made where it is used: copying it there would wait for the device.
    places = torch.arange(1, 2 * rows, 2, device=q.device) * queries // (2 * rows)
    some = Heads(q[:, :, places], k, v)
    scale = columns**-0.5 if scale is None else scale
    exact = Heads(*(t.float() for t in some))
    expected = scaled_dot_product_attention(*exact, scale=scale)
    lost = [_power(expected - y) for y in _rounded(some, scale, formats, scales)]
    return torch.stack(lost), _power(expected)


def _power(t: Tensor) -> Tensor:
    """Return the sum of squares of each head of (B, H, N, D), float64."""
    return t.square().sum(dim=(0, 2, 3), dtype=torch.float64)
