"""What operations that multiply codes share: axes, arguments, their two kinds of weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops.checks import IO_DTYPES, Weights, given
from quantkit.device.ops.op import Argument, Axis, Budget, Op, Variant
from quantkit.numerics.formats import FORMATS, INT4, INT8, find_format
from quantkit.numerics.nibbles import GROUP, MAX_FACTOR, integer_codes
from quantkit.numerics.packed_2to4 import LEGAL_NIBBLES, unpack_two_of_four
from quantkit.numerics.scales import decode

#: Float formats that kernels read.
FP8 = tuple(fmt.name for fmt in FORMATS.values() if not fmt.is_integer)
#: Word in an operation's name -> formats of the codes that it multiplies. A format's place in
#: FORMATS is its number in kernels/include/config.h.
CODES = {"fp8": FP8, "int8": (INT8.name,)}
IO = Axis("QK_IO", ("f16", "bf16", "f32"))
X_SCALE_AXIS = Axis("QK_X_SCALE", ("tensor", "token"))
W_SCALE_AXIS = Axis("QK_W_SCALE", ("tensor", "channel"))
TILE = Axis("QK_TILE", ("t0", "t1", "t2", "t3", "t4"))

M, N, K = Argument("m", "i32"), Argument("n", "i32"), Argument("k", "i32")
X_CODES, X_SCALE = Argument("x", "u8", "[m, k]"), Argument("x_scale", "f32", "[1] or [m]")

#: Of operations that sum products and round once.
SUMMED = Budget(
    1e-11,
    0.501,
    (1.5, 1.0),
    "one rounding to the output; in float32, half a spacing for each of two scales and the bias, "
    "and 3.5 sigma of a random walk of K roundings for sums of exact products in another order",
)

#: Codes of the weights of an operation that has three.
THREE = ("wq", "wk", "wv")
_CODES = ("w", *THREE)
#: Weights' arguments: codes, positions of 2:4 ones, scales of groups of int4 ones.
_WEIGHTS = tuple(f"{w}{behind}" for w in _CODES for behind in ("", "_meta", "_group"))


def formats(of: str, kind: str) -> Axis:
    """Return the axis of the format of X, W or Y in an operation on ``kind``, a key of CODES."""
    return format_axis(of, CODES[kind])


def format_axis(of: str, names: tuple[str, ...]) -> Axis:
    """Return the axis of the format of X, W or Y; ``names`` follow each other in FORMATS."""
    return Axis(f"QK_{of}_FORMAT", names, first=list(FORMATS).index(names[0]))


def scales_and_bias(rows: str) -> tuple[Argument, Argument]:
    """Return the arguments behind the weights, of which there are ``rows``."""
    bias = Argument("bias", "io", f"[{rows}]", null="no bias")
    return Argument("w_scale", "f32", f"[1] or [{rows}]"), bias


def named_weights(op: Op, weights: Sequence[Tensor | None]) -> Weights:
    """Return the weights' operands as ``checks`` take them: codes, and what these need."""
    arguments = (a for a in op.args if a.name in _WEIGHTS)
    # [n, k / 8]: a byte for 8 values of a row.
    return tuple(
        (a.name, given(weight), int(a.shape.partition("/")[2].removesuffix("]") or 1))
        for a, weight in zip(arguments, weights, strict=True)
    )


def with_sparse(dense: Op, *, formula: str, requires: tuple[str, ...] = ()) -> tuple[Op, Op]:
    """Return an operation and its twin on 2:4 weights: kept codes, and behind them positions.

    Args:
        dense: the operation.
        formula: of the twin.
        requires: of the twin.
    """
    sparse = replace(
        _with_weights(dense, per_byte=2, behind="meta", values=8),
        name=f"{dense.name}_sparse",
        source=dense.source.replace(".hip", "_sparse.hip"),
        formula=formula,
        k_multiple=32,
        reference=_on_kept(dense.reference, sum(a.name in _CODES for a in dense.args)),
        sparse=True,
        requires=requires,
    )
    return dense, sparse


def with_int4(dense: Op, requires: tuple[str, ...] = ()) -> Op:
    """Return an int8 operation's twin on int4 weights: codes, and behind them scales of 32 each.

    Args:
        dense: the operation on int8, whose last axis is the tile.
        requires: of the twin.
    """
    int4 = format_axis("W", (INT4.name,))
    *axes, tile = (int4 if axis.macro == int4.macro else axis for axis in dense.axes)
    return replace(
        _with_weights(dense, per_byte=INT4.codes_per_byte, behind="group", values=GROUP),
        name=f"{dense.family}_w4a8",
        source=dense.source.replace(".hip", "_w4a8.hip"),
        formula=f"{dense.name} of w[j, k] = (code[j, k] - 8) * w_group[j, k / {GROUP}]",
        # Operands always go through LDS, and the fifth tile's do not.
        axes=(*axes, replace(tile, words=tile.words[:4])),
        k_multiple=GROUP,
        reference=_on_decoded(dense.reference),
        requires=requires,
    )


def _with_weights(dense: Op, *, per_byte: int, behind: str, values: int) -> Op:
    """Return an operation whose weights are packed, with another operand behind each.

    Args:
        dense: the operation.
        per_byte: weights of a row that a byte of ``w`` holds.
        behind: how the other operand's name ends.
        values: weights of a row that a byte of it is for.
    """

    def packed(w: Argument) -> tuple[Argument, ...]:
        if w.name not in _CODES:
            return (w,)
        rows = w.shape.removeprefix("[").partition(",")[0]
        other = Argument(f"{w.name}_{behind}", "u8", f"[{rows}, k / {values}]")
        return replace(w, shape=f"[{rows}, k / {per_byte}]"), other

    schema = dense.schema
    for w in _CODES:
        schema = schema.replace(f"Tensor {w},", f"Tensor {w}, Tensor {w}_{behind},")
    args = tuple(part for argument in dense.args for part in packed(argument))
    return replace(dense, schema=schema, args=args)


def decode_int4(w: Tensor, w_group: Tensor) -> Tensor:
    """Return int8 codes of int4 ones, as their bytes in uint8.

    Args:
        w: (N, K / 2) uint8.
        w_group: (N, K / 32) uint8, the bytes of int8: -15 to 15.
    """
    return integer_codes(w, w_group.contiguous().view(torch.int8)).view(torch.uint8)


def _on_decoded(dense: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def decoded(
        x: Tensor, x_scale: Tensor, w: Tensor, w_group: Tensor, *others: Any, **options: Any
    ) -> Tensor:
        as_int8 = (INT8.name if other == INT4.name else other for other in others)
        return dense(x, x_scale, decode_int4(w, w_group), *as_int8, **options)

    return decoded


def _on_kept(dense: Callable[..., Any], weights: int) -> Callable[..., Any]:
    def sparse(x: Tensor, x_scale: Tensor, *others: Any, **options: Any) -> Any:
        kept, behind = others[: 2 * weights], others[2 * weights :]
        whole = map(unpack_two_of_four, kept[::2], kept[1::2])
        return dense(x, x_scale, *whole, *behind, **options)

    return sparse


def sample_codes(shape: tuple[int, ...], fmt: str, generator: torch.Generator) -> Tensor:
    """Return uniform random codes without NaN and infinity."""
    legal = torch.arange(256, dtype=torch.uint8)
    legal = legal[decode(legal, fmt).isfinite()]
    return legal[torch.randint(len(legal), shape, generator=generator)]


def sample_product(
    variant: Variant,
    shape: tuple[int, ...],
    rows: int,
    k: int,
    generator: torch.Generator,
    *,
    per_row: bool = False,
) -> tuple[Tensor, ...]:
    """Return random operands of a product up to the bias.

    Args:
        variant: of the operation.
        shape: of x, tokens along the first axis.
        rows: of the weights.
        k: length of a row.
        generator: of the numbers.
        per_row: rows of both have scales of their own where no axis says so.
    """
    x_format, stored = variant.word("QK_X_FORMAT"), find_format(variant.word("QK_W_FORMAT"))
    largest = stored.byte_format.max * find_format(x_format).max
    tokens = shape[0] if per_row or variant.word("QK_X_SCALE") == "token" else 1
    channels = rows if variant.word("QK_W_SCALE") != "tensor" else 1
    # Sums come into the range of float16.
    x_scale, w_scale = (
        0.5 / largest**0.5 * (0.5 + torch.rand(count, generator=generator))
        for count in (tokens, channels)
    )
    weights = _sample_weights(variant, rows, k, generator)
    bias = torch.randn(rows, generator=generator).to(IO_DTYPES[variant.word("QK_IO") or "f32"])
    x = sample_codes(shape, x_format, generator)
    return (x, x_scale, *weights, w_scale, bias)


def _sample_weights(
    variant: Variant, rows: int, k: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Return codes, and behind them positions of 2:4 ones, or factors of int4 ones."""
    fmt = variant.word("QK_W_FORMAT")
    if fmt == INT4.name:
        packed = torch.randint(256, (rows, k // INT4.codes_per_byte), generator=generator)
        group = torch.randint(1, MAX_FACTOR + 1, (rows, k // GROUP), generator=generator)
        sign = torch.randint(2, group.shape, generator=generator) * 2 - 1
        return packed.to(torch.uint8), (group * sign).to(torch.int8).view(torch.uint8)
    if not variant.op.sparse:
        return (sample_codes((rows, k), fmt, generator),)
    codes = sample_codes((rows, k // 2), fmt, generator)
    drawn = torch.randint(len(LEGAL_NIBBLES), (rows, k // 4), generator=generator)
    nibbles = torch.tensor(LEGAL_NIBBLES, dtype=torch.uint8)[drawn]
    return codes, nibbles[:, ::2] | nibbles[:, 1::2] << 4
