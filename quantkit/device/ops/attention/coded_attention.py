"""Attention on codes: scores, their softmax over any number of keys, and the mean of the values."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.device.geometry import own_tile
from quantkit.device.ops.axes import IO, M, N, format_axis
from quantkit.device.ops.checks import IO_DTYPES, check_device, expect, given, io_word
from quantkit.device.ops.op import (
    Argument,
    Axis,
    Budget,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
)
from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.attention_factors import (
    COLUMNS,
    KEYS,
    RUN,
    attention_codes,
    cut_to_float16,
    padded,
)
from quantkit.numerics.attention_limits import LARGEST_HEAD
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.scales import cast, decode

SOURCE = "attention.hip"

_HEAD = Axis("QK_HEAD", tuple(f"d{d}" for d in range(COLUMNS, LARGEST_HEAD + 1, COLUMNS)), first=1)

#: Probabilities and values: e4m3fn, or float16.
PV_AXES = {E4M3FN.name: Axis("QK_PV", ("",)), None: Axis("QK_PV", ("f16",), first=1)}

#: kernels/include/softmax.h: where probabilities start, and what a score may exceed it by.
_TOP, _OUTGROWN = 8.0, 8.75


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor,
    v_mean: Tensor | None,
    keys: int,
    heads: int,
    head_size: int,
    qk_format: str,
    dtype: torch.dtype,
    *,
    precision: torch.dtype = torch.float32,
    tile: int | None = None,
) -> Tensor:
    """Return attention with the kernel's rounding of probabilities.

    Args:
        q: (N, M, D) uint8 codes of N = pictures * heads, D a multiple of 16.
        k: (N, keys, D).
        v: (N, D, pitch) uint8 codes in e4m3fn, or float16, as probabilities are then; columns from
            ``keys`` on are zero.
        q_scale: float32 (N, M), and
        k_scale: float32 (N, keys / 16 up), of int8 codes; None: products of codes are scores in
            powers of two.
        v_scale: float32 (S, D), row n of the heads has n % S.
        v_mean: float32 (S, D), added to the result, or None.
        keys: how many count.
        heads: of a picture.
        head_size: columns of the result, at most D.
        qk_format: of q and k.
        dtype: of the result.
        precision: of products and sums; float64 makes them exact enough to judge the others by.
        tile: keys of a step; None: the kernel's. Of float16 probabilities it only changes which of
            the smallest are rounded to nothing.

    Returns:
        (N / heads, M, heads, head_size).
    """
    queries = decode(q, qk_format, precision)
    pv = None if v.dtype == torch.float16 else E4M3FN.name
    values = v.to(precision) if pv is None else decode(v, pv, precision)
    tile = _tile_of(q.shape[2]) if tile is None else tile
    bias = torch.full(q.shape[:2], _TOP, dtype=precision, device=q.device).unsqueeze(2)
    out, total = bias.new_zeros(q.shape), torch.zeros_like(bias)
    whole = (keys - 1) // tile * tile
    # As the kernel: the tile that the keys do not fill comes first.
    for start in (whole, *range(0, whole, tile)):
        part = slice(start, min(start + tile, keys))
        s = queries @ decode(k[:, part], qk_format, precision).transpose(1, 2)
        if k_scale is not None:
            s = s * (given(q_scale).to(precision)[:, :, None] * _by_key(k_scale, part)[:, None])
        s = s + bias
        top = s.amax(dim=2, keepdim=True)
        outgrown = (top > _OUTGROWN) | (start == whole)
        growth = torch.where(outgrown, (top - _TOP).ceil(), torch.zeros_like(top))
        factor = torch.ones_like(growth) if start == whole else torch.exp2(-growth)
        p = torch.exp2(s - growth).float()
        p = (cut_to_float16(p) if pv is None else cast(p, E4M3FN)).to(precision)
        bias = bias - growth
        total = total * factor + p.sum(dim=2, keepdim=True)
        out = out * factor + p @ values[:, :, part].transpose(1, 2)
    y = out / total * _of_heads(v_scale, len(q), precision)
    if v_mean is not None:
        y = y + _of_heads(v_mean, len(q), precision)
    pictures = y.to(dtype).reshape(len(q) // heads, heads, q.shape[1], q.shape[2])
    return pictures.transpose(1, 2)[..., :head_size].contiguous()


def _tile_of(columns: int) -> int:
    """Return the keys of a step of the kernel's loop, which all formats share."""
    tile = own_tile(SOURCE, f"d{columns}")
    assert tile is not None
    return tile.n


def _by_key(k_scale: Tensor, part: slice) -> Tensor:
    return k_scale.repeat_interleave(KEYS, dim=1)[:, part]


def _of_heads(numbers: Tensor, rows: int, precision: torch.dtype) -> Tensor:
    return numbers.to(precision).repeat(rows // len(numbers), 1).unsqueeze(1)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    (q, k, v, q_scale, k_scale, v_scale, v_mean) = operands
    keys, heads, head_size, qk_format, dtype = options
    q, k, v, v_scale = given(q), given(k), given(v), given(v_scale)
    if qk_format not in op.words("QK_X_FORMAT"):
        expected = ", ".join(op.words("QK_X_FORMAT"))
        raise KernelError(f"{op.name}: format {qk_format!r}, expected {expected}")
    word = io_word(op.name, dtype)
    if q.ndim != 3 or q.dtype != torch.uint8:
        raise ShapeError(
            f"{op.name}: q is {q.dtype} of shape {tuple(q.shape)}, expected uint8 codes (N, M, D)"
        )
    (n, m, d), scales = q.shape, v_scale.shape[0]
    if f"d{d}" not in _HEAD.words:
        raise ShapeError(
            f"{op.name}: heads of {d} columns, expected a multiple of {COLUMNS} up to "
            f"{LARGEST_HEAD}"
        )
    _check_sizes(op.name, n, keys=keys, heads=heads, head_size=head_size, columns=d, scales=scales)
    pitch = padded(keys, RUN)
    expect(op.name, "k", k, torch.uint8, (n, keys, d))
    (value_word,) = op.words("QK_PV")
    expect(op.name, "v", v, torch.float16 if value_word else torch.uint8, (n, d, pitch))
    expect(op.name, "v_scale", v_scale, torch.float32, (scales, d))
    if v_mean is not None:
        expect(op.name, "v_mean", v_mean, torch.float32, (scales, d))
    _check_scales(op.name, q_scale, k_scale, qk_format, (n, m, padded(keys, KEYS) // KEYS))
    named = zip((a.name for a in op.args), operands, strict=False)
    for name, tensor in named:
        if tensor is not None:
            check_device(op.name, name, tensor, q)
    sizes = {
        "m": m, "n": n, "k": d, "keys": keys, "pitch": pitch, "heads": heads, "d": head_size,
        "scales": scales,
    }  # fmt: skip
    return Problem((word, qk_format, f"d{d}", value_word), sizes)


def _check_sizes(
    op: str, n: int, *, keys: int, heads: int, head_size: int, columns: int, scales: int
) -> None:
    if keys < 1:
        raise ShapeError(f"{op}: {keys} keys, expected 1 or more")
    if heads < 1 or n % heads:
        raise ShapeError(f"{op}: {n} rows of {heads} heads, expected whole pictures")
    if not columns - COLUMNS < head_size <= columns or head_size % 8:
        raise ShapeError(
            f"{op}: head_size {head_size}, expected a multiple of 8 that {columns} columns hold"
        )
    if n and (scales < 1 or n % scales):
        raise ShapeError(f"{op}: v_scale has {scales} rows, expected a divisor of {n}")


def _check_scales(
    op: str, q_scale: Tensor | None, k_scale: Tensor | None, fmt: str, shape: tuple[int, int, int]
) -> None:
    n, m, groups = shape
    for name, scale, count in (("q_scale", q_scale, m), ("k_scale", k_scale, groups)):
        if (scale is None) == (fmt == INT8.name):
            raise KernelError(f"{op}: {name} belongs to int8 codes, and to them alone")
        if scale is not None:
            expect(op, name, scale, torch.float32, (n, count))


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    _, heads, head_size, _, dtype = options
    n, m, _ = given(operands[0]).shape
    return (((n // heads, m, heads, head_size), dtype),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    (m, keys, _), columns = sizes, int(variant.word("QK_HEAD")[1:])
    heads, fmt = 2, variant.word("QK_X_FORMAT")
    q, k, v = (torch.randn(heads, n, columns - 8, generator=generator) for n in (m, keys, keys))
    pv = None if variant.word("QK_PV") else E4M3FN.name
    codes = attention_codes(2 * q, k + 1, v + 1, qk_format=fmt, pv=pv)
    operands = (
        codes.q, codes.k, codes.v, codes.q_scale, codes.k_scale, codes.v_scale, codes.v_mean,
    )  # fmt: skip
    return operands, (keys, heads, columns - 8, fmt, IO_DTYPES[variant.word("QK_IO")])


_FORMULA = (
    "p[n, i, j] = exp2({score}), {rounded} after the largest of i became 2^8; y = "
    "sum_j(p[n, i, j] * v[n, c, j]) / sum_j(p[n, i, j]) * v_scale[n % scales, c] + "
    "v_mean[n % scales, c]"
)
_BUDGET = Budget(
    1e-6,
    2.0,
    (1.5, 1.0),
    "a probability beside the boundary of two codes, which another order of sums moves across, is "
    "a sixteenth off",
)
_F16_BUDGET = replace(
    _BUDGET,
    nmse=1e-8,
    reason="a probability beside a float16, which another order of sums moves across, is a "
    "1024th off",
)


def _op(name: str, qk_format: str, score: str, pv: str | None = E4M3FN.name) -> Op:
    scaled = qk_format == INT8.name
    null = "" if scaled else "products of codes are scores"
    return Op(
        name=name,
        family="attention" if pv else "attention_f16",
        source=SOURCE,
        formula=_FORMULA.format(score=score, rounded=f"rounded to {pv}" if pv else "cut to f16"),
        schema=(
            "(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor v_scale, "
            "Tensor? v_mean, int keys, int heads, int head_size, str qk_format, ScalarType dtype) "
            "-> Tensor"
        ),
        axes=(IO, format_axis("X", (qk_format,)), _HEAD, PV_AXES[pv]),
        args=(
            Argument("q", "u8", "[n, m, QK_HEAD * 16]"),
            Argument("k", "u8", "[n, keys, QK_HEAD * 16]"),
            Argument("v", "u8" if pv else "f16", "[n, QK_HEAD * 16, pitch]"),
            Argument("q_scale", "f32", "[n, m]", null=null),
            Argument("k_scale", "f32", f"[n, ceil_div(keys, {KEYS})]", null=null),
            Argument("v_scale", "f32", "[scales, QK_HEAD * 16]"),
            Argument("v_mean", "f32", "[scales, QK_HEAD * 16]", null="nothing is added"),
            Argument("y", "io", "[n // heads, m, heads, d]", written=True),
            *(M, N),
            *(Argument(number, "i32") for number in ("keys", "pitch", "heads", "d", "scales")),
        ),
        k_multiple=COLUMNS,
        check=_check,
        outputs=_outputs,
        reference=attention,
        budget=_BUDGET if pv else _F16_BUDGET,
        sample=_sample,
        requires=(f"pitch % {RUN} == 0", "pitch >= keys", "d % 8 == 0", "n % heads == 0"),
    )


_SCORE = "sum_c(q[n, i, c] * k[n, j, c])"
_SCALED = f"{_SCORE} * q_scale[n, i] * k_scale[n, j / {KEYS}]"
OPS = (
    _op("attention_fp8", E4M3FN.name, _SCORE),
    _op("attention_int8", INT8.name, _SCALED),
    _op("attention_fp8_f16", E4M3FN.name, _SCORE, None),
    _op("attention_int8_f16", INT8.name, _SCALED, None),
)
