"""Dynamic scales of attention: ranges of heads by chunk of tokens, and the factors they give."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from math import isfinite

import torch
from torch import Tensor

from quantkit.device.ops.attention.heads import check_projection
from quantkit.device.ops.axes import IO, K, M, N, format_axis
from quantkit.device.ops.checks import IO_DTYPES, check_device, expect, float_bits, given, io_word
from quantkit.device.ops.op import (
    Argument,
    Budget,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
)
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics import head_partials as parts
from quantkit.numerics.attention_factors import COLUMNS, factors_of_scales, padded
from quantkit.numerics.attention_limits import LARGEST_HEAD, takes_heads
from quantkit.numerics.attention_scales import scales_of_ranges
from quantkit.numerics.formats import E4M3FN, INT8

#: Columns that a lane loads at once.
_ALIGNED = parts.RUN
_PLACES = ("c_q", "c_k", "c_v")


def head_partials(
    x_q: Tensor, x_k: Tensor, x_v: Tensor, columns: tuple[int, ...], heads: int, head_size: int
) -> tuple[Tensor, Tensor]:
    """Return what factors of heads follow from, by chunk of tokens.

    Args:
        x_q: (B, T, C) float16, bfloat16 or float32.
        x_k: (B, T2, C2) of the same dtype.
        x_v: (B, T2, C3) likewise.
        columns: where the heads of q, k and v begin, multiples of 8.
        heads: of a picture.
        head_size: D, columns of a head, a multiple of 8.

    Returns:
        (B * heads, chunks, D / 8) float32, the largest |q| of runs of 8 columns; and
        (B * heads, 2, chunks, 3, D) float32, of the columns of keys and of values: sum, smallest
        and largest. ``quantkit.numerics.head_partials`` says what NaN and empty chunks give.
    """
    tokens = max(x_q.shape[1], x_k.shape[1])
    rows = [
        x[..., at : at + heads * head_size].float().reshape(*x.shape[:2], heads, head_size)
        for x, at in zip((x_q, x_k, x_v), columns, strict=True)
    ]
    of_q, *others = (row.transpose(1, 2).flatten(0, 1) for row in rows)
    made = torch.stack([parts.column_partials(x, tokens) for x in others], dim=1)
    return parts.largest_partials(of_q, tokens), made


def _head_factors(
    fmt: str, q_amax: Tensor, partials: Tensor, keys: int, tau: float
) -> tuple[Tensor, ...]:
    (k_mean, k_range), (v_mean, v_range) = (_spread(side, keys) for side in partials.unbind(dim=1))
    scales = scales_of_ranges(
        q=q_amax.flatten(1).amax(dim=1),
        k=k_range.amax(dim=1),
        k_mean=k_mean,
        v=v_range,
        v_mean=v_mean,
        margin=1,
    )
    return tuple(factors_of_scales(scales, fmt, tau))


def _spread(side: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the mean of each column, and how far the farthest number is from it."""
    total, low, high = parts.merged_columns(side)
    # By a tensor: a GPU multiplies by the reciprocal of a Python number.
    mean = total / torch.full_like(total, keys)
    return mean, torch.maximum(high - mean, mean - low)


def head_factors_fp8(q_amax: Tensor, partials: Tensor, keys: int, tau: float) -> tuple[Tensor, ...]:
    """Return the factors and means that quantize heads to e4m3fn.

    Args:
        q_amax: (N, chunks, D / 8) float32, of ``head_partials``, and
        partials: (N, 2, chunks, 3, D) float32.
        keys: T2.
        tau: what a product of queries and keys is multiplied by to be a score in powers of two.

    Returns:
        the fields of ``HeadFactors``, of N heads.
    """
    return _head_factors(E4M3FN.name, q_amax, partials, keys, tau)


def head_factors_int8(
    q_amax: Tensor, partials: Tensor, keys: int, tau: float
) -> tuple[Tensor, ...]:
    """Return those of int8 codes, whose scales are their own; the rest as in FP8."""
    return _head_factors(INT8.name, q_amax, partials, keys, tau)


def _check_partials(op: Op, operands: Operands, options: Options) -> Problem:
    columns, heads, d = options
    q, k, v = (given(x) for x in operands)
    word = io_word(op.name, q.dtype)
    if not takes_heads(d) or heads < 1 or len(columns) != len(_PLACES):
        raise ShapeError(
            f"{op.name}: {heads} heads of {d} from columns {list(columns)} on, expected heads of a "
            f"multiple of {_ALIGNED} up to {LARGEST_HEAD}, from {len(_PLACES)} columns on"
        )
    for name, x, column in zip("qkv", (q, k, v), columns, strict=True):
        check_projection(op.name, f"x_{name}", x, q, column, heads * d)
        check_device(op.name, f"x_{name}", x, q)
    if k.shape[1] < 1 or v.shape[1] != k.shape[1]:
        raise ShapeError(
            f"{op.name}: {k.shape[1]} keys and {v.shape[1]} values, expected one or more of both"
        )
    numbers = {
        "m": max(q.shape[1], k.shape[1]), "n": q.shape[0] * heads, "k": d,
        "q_tokens": q.shape[1], "keys": k.shape[1],
        **{f"{name}_pitch": x.shape[2] for name, x in zip("qkv", (q, k, v), strict=True)},
        **dict(zip(_PLACES, columns, strict=True)), "heads": heads,
    }  # fmt: skip
    return Problem((word,), numbers)


def _check_factors(op: Op, operands: Operands, options: Options) -> Problem:
    q_amax, partials = (given(t) for t in operands)
    keys, tau = options
    if q_amax.ndim != 3:
        raise ShapeError(f"{op.name}: q_amax is {tuple(q_amax.shape)}, expected (N, chunks, runs)")
    rows, chunks, runs = q_amax.shape
    d = _ALIGNED * runs
    if not takes_heads(d) or not 0 < chunks <= parts.CHUNKS or keys < 1:
        raise ShapeError(
            f"{op.name}: {keys} keys in {chunks} chunks of {d} columns, expected one or more in "
            f"at most {parts.CHUNKS} of at most {LARGEST_HEAD}"
        )
    expect(op.name, "q_amax", q_amax, torch.float32, (rows, chunks, runs))
    expect(op.name, "partials", partials, torch.float32, (rows, 2, chunks, parts.NUMBERS, d))
    check_device(op.name, "partials", partials, q_amax)
    numbers = {"m": chunks, "n": rows, "k": d, "keys": keys, "tau": _bits(op.name, tau)}
    return Problem(op.words("QK_X_FORMAT"), numbers)


def _bits(op: str, tau: float) -> int:
    """Return the bits of a factor of scores."""
    if not (isfinite(tau) and tau > 0):
        raise KernelError(f"{op}: tau {tau}, expected a positive number")
    return float_bits(tau)


def _partial_shapes(operands: Operands, options: Options) -> tuple[Output, ...]:
    q, k, (_, heads, d) = given(operands[0]), given(operands[1]), options
    rows, chunks = q.shape[0] * heads, parts.chunk_count(max(q.shape[1], k.shape[1]))
    return (
        ((rows, chunks, d // _ALIGNED), torch.float32),
        ((rows, 2, chunks, parts.NUMBERS, d), torch.float32),
    )


def _factor_shapes(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    rows, _, runs = given(operands[0]).shape
    by_column = ((rows, padded(_ALIGNED * runs)), torch.float32)
    by_head = ((rows,), torch.float32)
    return by_column, by_head, by_head, by_column, by_column


def _sample_partials(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    """Return projections of two pictures with three heads: as many keys as m, or a third."""
    m, n, k = sizes
    dtype, heads = IO_DTYPES[variant.word("QK_IO")], 3
    d = _ALIGNED * (1 + k // 16 % 20)

    def normal(tokens: int, beside: int) -> Tensor:
        shape = (2, tokens, heads * d + beside)
        return (torch.randn(shape, generator=generator) * 2 + 0.5).to(dtype)

    keys = m if n % 2 else m // 3 + 1
    operands = (normal(m, 0), normal(keys, _ALIGNED), normal(keys, 3 * _ALIGNED))
    return operands, ((0, _ALIGNED, 2 * _ALIGNED), heads, d)


def _sample_factors(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    del variant
    m, n, k = sizes
    heads, d = 3, _ALIGNED * (1 + k // 16 % 20)
    q, kv = (torch.randn(2, t, heads * d, generator=generator) for t in (m, n))
    made = head_partials(q, kv, kv.flip(1) + 1, (0, 0, 0), heads, d)
    return made, (n, 0.18)


def _projection(name: str, tokens: str) -> Argument:
    return Argument(f"x_{name}", "io", f"[n // heads, {tokens}, {name}_pitch]")


_CHUNKS = "ceil_div(m, 32 * ceil_div(m, 1024))"
_WIDTH = f"ceil_div(k, {COLUMNS}) * {COLUMNS}"
_NUMBERS = tuple(
    Argument(name, "i32")
    for name in (
        "q_tokens", "keys", *(f"{name}_pitch" for name in "qkv"), *_PLACES, "heads",
    )
)  # fmt: skip
_FITS = f"k <= {LARGEST_HEAD}"
_PARTIALS = Op(
    name="head_partials",
    family="head_partials",
    source="head_partials.hip",
    formula=(
        "q_amax[n, i, r] = max |x_q[n, t, c]|, t in the i-th of at most 32 chunks of tokens, c in "
        "the r-th run of 8 columns; partials[n, s, i, :, c] = sum, smallest and largest of "
        "x_k[n, t, c] (s = 0) and of x_v"
    ),
    schema="(Tensor x_q, Tensor x_k, Tensor x_v, int[] columns, int heads, int head_size) "
    "-> (Tensor, Tensor)",
    axes=(IO,),
    args=(
        *(_projection("q", "q_tokens"), _projection("k", "keys"), _projection("v", "keys")),
        Argument("q_amax", "f32", f"[n, {_CHUNKS}, k // {_ALIGNED}]", written=True),
        Argument("partials", "f32", f"[n, 2, {_CHUNKS}, {parts.NUMBERS}, k]", written=True),
        *(M, N, K, *_NUMBERS),
    ),
    k_multiple=_ALIGNED,
    check=_check_partials,
    outputs=_partial_shapes,
    reference=head_partials,
    budget=Budget(0.0, 0.0, (0.0, 0.0), "sums have one order"),
    sample=_sample_partials,
    requires=(
        _FITS,
        "n % heads == 0",
        *(f"{name}_pitch % {_ALIGNED} == 0" for name in "qkv"),
        *(f"{name} % {_ALIGNED} == 0" for name in _PLACES),
    ),
)


def _factors(kind: str, fmt: str) -> Op:
    reference = head_factors_fp8 if fmt == E4M3FN.name else head_factors_int8
    factors = (
        "a = min(sqrt(tau range_k / range_q), 448 / range_q) and min(tau / a, 448 / range_k)"
        if fmt == E4M3FN.name
        else "tau and 1"
    )
    return Op(
        name=f"head_factors_{kind}",
        family="head_factors",
        source="head_factors.hip",
        formula=(
            "mean[n, c] of keys and of values = sum / keys; range[n, c] = max(largest - mean, "
            f"mean - smallest); v_scale = range / 448; q_factor[n], k_factor[n] = {factors}; 1 for "
            "a range or scale of 0"
        ),
        schema="(Tensor q_amax, Tensor partials, int keys, float tau) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        axes=(format_axis("X", (fmt,)),),
        args=(
            Argument("q_amax", "f32", f"[n, m, k // {_ALIGNED}]"),
            Argument("partials", "f32", f"[n, 2, m, {parts.NUMBERS}, k]"),
            Argument("k_mean", "f32", f"[n, {_WIDTH}]", written=True),
            Argument("q_factor", "f32", "[n]", written=True),
            Argument("k_factor", "f32", "[n]", written=True),
            Argument("v_mean", "f32", f"[n, {_WIDTH}]", written=True),
            Argument("v_scale", "f32", f"[n, {_WIDTH}]", written=True),
            *(M, N, K, Argument("keys", "i32"), Argument("tau", "i32")),
        ),
        k_multiple=_ALIGNED,
        check=_check_factors,
        outputs=_factor_shapes,
        reference=reference,
        budget=Budget(0.0, 0.0, (0.0, 0.0), "every operation is rounded in the same order"),
        sample=_sample_factors,
        requires=(_FITS, f"m <= {parts.CHUNKS}"),
    )


OPS = (_PARTIALS, _factors("fp8", E4M3FN.name), _factors("int8", INT8.name))
