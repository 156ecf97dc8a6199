"""Heads in one or two streams of tokens, and what kernels make of them, in plain PyTorch.

The streams of joint attention lie behind each other along the tokens: ``first``, then ``second``.
Heads lie side by side in a row of a stream, from a column on that the call names, so that fused
projections need no copies. What the codes are stands in ``quantkit.numerics.attention_factors``.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.device.ops.checks import given
from quantkit.numerics.attention_factors import (
    COLUMNS,
    e4m3fn_codes,
    int8_codes,
    padded,
    value_codes,
)
from quantkit.numerics.formats import E4M3FN

#: Values that a kernel loads at a time.
ALIGNED = 8
#: How columns of a rotation pair up: not at all, neighbours, or those half a head apart, which are
#: -1 and -2 of diffusers' ``use_real_unbind_dim``.
ROTATIONS = ("none", "pairs", "halves")


@dataclass(frozen=True, eq=False)
class Streams:
    """The layout of heads in one or two streams: (B, T1, C1) and (B, T2, C2), or None."""

    first: Tensor
    second: Tensor | None
    first_column: int
    second_column: int
    heads: int
    head_size: int

    @property
    def tokens(self) -> int:
        """Tokens of both."""
        return self.first.shape[1] + (0 if self.second is None else self.second.shape[1])

    @property
    def rows(self) -> int:
        """Heads of all pictures."""
        return self.first.shape[0] * self.heads

    @property
    def numbers(self) -> dict[str, int]:
        """The integers among the arguments, but for m, n and k."""
        return {
            "first_tokens": self.first.shape[1],
            "first_pitch": self.first.shape[2],
            "first_column": self.first_column,
            "second_pitch": 0 if self.second is None else self.second.shape[2],
            "second_column": self.second_column,
            "heads": self.heads,
            "d": self.head_size,
        }

    def parts(self) -> list[Tensor]:
        """Return (B, T, heads, d) float32 of every stream."""
        given_parts = ((self.first, self.first_column), (self.second, self.second_column))
        size = (self.heads, self.head_size)
        return [
            x[..., column : column + prod(size)].float().reshape(*x.shape[:2], *size)
            for x, column in given_parts
            if x is not None
        ]


def head_codes_fp8(
    first: Tensor,
    second: Tensor | None,
    first_weight: Tensor | None,
    second_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    mean: Tensor | None,
    factor: Tensor,
    first_column: int,
    second_column: int,
    heads: int,
    head_size: int,
    eps: float,
    rotary: str,
) -> Tensor:
    """Return e4m3fn codes of heads, saturated; NaN stays NaN.

    Args:
        first: (B, T1, C) float16, bfloat16 or float32.
        second: (B, T2, C2), tokens that stand behind those of ``first``, or None.
        first_weight: (head_size,) float32: rows are divided by the root of their mean square and
            multiplied by this; None: they are not.
        second_weight: likewise, of ``second``.
        cos: (T1 + T2, head_size) float32, and
        sin: of a rotation, or None.
        mean: (S, D) float32, D the head size up to a multiple of 16: taken off after norm and
            rotation; row n of the heads has n % S; None: zeros.
        factor: (S,) float32.
        first_column: of ``first`` where heads begin, a multiple of 8.
        second_column: likewise.
        heads: of a picture.
        head_size: columns of a head, a multiple of 8.
        eps: added to the mean square, rounded to float32.
        rotary: one of ROTATIONS.

    Returns:
        (B * heads, T1 + T2, D) uint8, zero from column ``head_size`` on.
    """
    streams = Streams(first, second, first_column, second_column, heads, head_size)
    rows = normed_and_rotated(streams, (first_weight, second_weight), (cos, sin), eps, rotary)
    rows = rows.flatten(0, 1)
    return _padded(e4m3fn_codes(rows, _narrow(mean, head_size), factor))


def head_codes_int8(
    first: Tensor,
    second: Tensor | None,
    first_weight: Tensor | None,
    second_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    mean: Tensor | None,
    factor: Tensor,
    first_column: int,
    second_column: int,
    heads: int,
    head_size: int,
    eps: float,
    rotary: str,
    group: int,
) -> tuple[Tensor, Tensor]:
    """Return int8 codes of heads, and scales of ``group`` tokens each; the rest as in FP8.

    Args:
        group: 1 (queries) or 16 (keys).

    Returns:
        (B * heads, T1 + T2, D) uint8 and (B * heads, (T1 + T2) / group up) float32.
    """
    streams = Streams(first, second, first_column, second_column, heads, head_size)
    rows = normed_and_rotated(streams, (first_weight, second_weight), (cos, sin), eps, rotary)
    rows = rows.flatten(0, 1)
    codes, scale = int8_codes(rows, _narrow(mean, head_size), factor, group)
    return _padded(codes), scale


def value_codes_fp8(
    first: Tensor,
    second: Tensor | None,
    mean: Tensor | None,
    scale: Tensor,
    first_column: int,
    second_column: int,
    heads: int,
    head_size: int,
    *,
    pv: str | None = E4M3FN.name,
) -> Tensor:
    """Return e4m3fn codes of ``(x - mean) * (1 / scale)``, transposed; NaN stays NaN.

    Args:
        first: (B, T1, C) float16, bfloat16 or float32.
        second: (B, T2, C2), tokens that stand behind those of ``first``, or None.
        mean: (S, D) float32, D the head size up to a multiple of 16; row n of the heads has n % S;
            None: zeros.
        scale: (S, D) float32.
        first_column: of ``first`` where heads begin, a multiple of 8.
        second_column: likewise.
        heads: of a picture.
        head_size: columns of a head, a multiple of 8.
        pv: None: float16 instead.

    Returns:
        (B * heads, D, pitch) uint8, or float16: pitch is T1 + T2 up to a multiple of 16. Zero from
        column ``head_size`` and from token T1 + T2 on.
    """
    streams = Streams(first, second, first_column, second_column, heads, head_size)
    rows = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in streams.parts()], dim=1)
    codes = value_codes(rows, _narrow(mean, head_size), scale[:, :head_size], pv)
    return pad(codes, (0, 0, 0, padded(head_size) - head_size))


#: The same in float16, saturated at 65504.
value_codes_f16 = partial(value_codes_fp8, pv=None)


def normed_and_rotated(
    streams: Streams,
    weights: Sequence[Tensor | None],
    rotation: Sequence[Tensor | None],
    eps: float,
    rotary: str,
) -> Tensor:
    """Return (B, heads, tokens, d) float32 of all streams, one behind the other."""
    parts = (
        part if weight is None else _normalized(part, weight, eps)
        for part, weight in zip(streams.parts(), weights, strict=False)
    )
    x = torch.cat([part.transpose(1, 2) for part in parts], dim=2)
    if rotary != ROTATIONS[0]:
        x = x * given(rotation[0]) + _rotated(x, rotary) * given(rotation[1])
    return x


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x x) + eps) * weight, summed in the kernel's order."""
    d, runs = x.shape[-1], 2 * lanes_of(x.shape[-1])
    squares = pad(x * x, (0, ALIGNED * runs - d)).reshape(*x.shape[:-1], runs, ALIGNED)
    total = _neighbours(_folded(squares).squeeze(-1))
    # By tensors: a GPU multiplies by the reciprocal of a Python number.
    share = torch.ones_like(total) / torch.full_like(total, d)
    mean = total * share + torch.full_like(total, eps)
    # torch's float32 root is not rounded to nearest on every CPU; that of float64 is near enough.
    return x * (torch.ones_like(mean) / mean.double().sqrt().float()) * weight


def _folded(t: Tensor) -> Tensor:
    """Return the sum of a power of two of elements, the first half to the second each time."""
    while t.shape[-1] > 1:
        low, high = t.chunk(2, dim=-1)
        t = low + high
    return t


def _neighbours(t: Tensor) -> Tensor:
    """Return the same sum, neighbours to each other each time."""
    while t.shape[-1] > 1:
        t = t[..., ::2] + t[..., 1::2]
    return t


def _rotated(x: Tensor, rotary: str) -> Tensor:
    """Return what diffusers multiplies by the sine."""
    if rotary == "pairs":
        even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        return torch.stack((-odd, even), dim=-1).flatten(-2)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def lanes_of(head_size: int, columns: int = COLUMNS) -> int:
    """Return the least power of two whose lanes of so many columns hold a row."""
    return 1 << (-(-head_size // columns) - 1).bit_length()


def _narrow(numbers: Tensor | None, columns: int) -> Tensor | None:
    return None if numbers is None else numbers[:, :columns]


def _padded(codes: Tensor) -> Tensor:
    return pad(codes, (0, padded(codes.shape[-1]) - codes.shape[-1]))
