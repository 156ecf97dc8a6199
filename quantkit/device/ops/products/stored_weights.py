"""Common parts of products of codes: axes, arguments, and the axis of their weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops.axes import format_axis
from quantkit.device.ops.checks import IO_DTYPES, StoredWeights, given
from quantkit.device.ops.op import Argument, Axis, Budget, Op, Variant, WeightKind
from quantkit.numerics.formats import INT4, INT8, find_format
from quantkit.numerics.nibbles import GROUP, MAX_FACTOR, integer_codes
from quantkit.numerics.packed_2to4 import LEGAL_NIBBLES, unpack_two_of_four
from quantkit.numerics.scales import decode

X_SCALE_AXIS = Axis("QK_X_SCALE", ("tensor", "token"))
W_SCALE_AXIS = Axis("QK_W_SCALE", ("tensor", "channel"))
TILE = Axis("QK_TILE", ("t0", "t1", "t2", "t3", "t4"))

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


def scales_and_bias(rows: str) -> tuple[Argument, Argument]:
    """Return the arguments behind the weights, of which there are ``rows``."""
    bias = Argument("bias", "io", f"[{rows}]", null="no bias")
    return Argument("w_scale", "f32", f"[1] or [{rows}]"), bias


def named_weights(op: Op, weights: Sequence[Tensor | None]) -> StoredWeights:
    """Return the weights' operands as ``checks`` take them: codes, and what these need."""
    arguments = (a for a in op.args if a.name in _WEIGHTS)
    # [n, k / 8]: a byte for 8 values of a row.
    return tuple(
        (a.name, given(weight), int(a.shape.partition("/")[2].removesuffix("]") or 1))
        for a, weight in zip(arguments, weights, strict=True)
    )


#: Codes and the operand behind them -> codes of dense weights.
_Decode = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Stored:
    """Weights that are not dense codes: how they lie in memory, and the operand behind them."""

    #: of the operation's name, over the dense one's and the family
    name: str
    #: how the name of the operand behind them ends
    behind: str
    #: weights of a row that a byte of it is for
    values: int
    #: what K is a multiple of
    k_multiple: int
    decode: _Decode
    #: of the operation, over the dense one's
    formula: str


def decode_int4(w: Tensor, w_group: Tensor) -> Tensor:
    """Return int8 codes of int4 ones, as their bytes in uint8.

    Args:
        w: (N, K / 2) uint8.
        w_group: (N, K / 32) uint8, the bytes of int8: -15 to 15.
    """
    return integer_codes(w, w_group.contiguous().view(torch.int8)).view(torch.uint8)


_STORED = {
    WeightKind.SPARSE: _Stored(
        name="{dense}_sparse",
        behind="meta",
        values=8,
        k_multiple=32,
        decode=unpack_two_of_four,
        formula=(
            "{dense} of dense(w, w_meta); nibble g of a row of w_meta holds the positions of "
            "w[j, 2g], w[j, 2g + 1] in columns 4g to 4g + 3 (bits 1:0 and 3:2)"
        ),
    ),
    WeightKind.INT4: _Stored(
        name="{family}_w4a8",
        behind="group",
        values=GROUP,
        k_multiple=GROUP,
        decode=decode_int4,
        formula=f"{{dense}} of w[j, k] = (code[j, k] - 8) * w_group[j, k / {GROUP}]",
    ),
}
#: Key of CODES -> how weights on which it multiplies may lie in memory.
WEIGHTS = {
    "fp8": (WeightKind.DENSE, WeightKind.SPARSE),
    "int8": (WeightKind.DENSE, WeightKind.SPARSE, WeightKind.INT4),
}


def products(
    dense: Callable[[str, int], Op], weights: Mapping[str, Sequence[WeightKind]] = WEIGHTS
) -> tuple[Op, ...]:
    """Return the rows of a product, one for each kind of codes and of weights.

    Args:
        dense: makes the operation on dense weights from a key of CODES and what K is a multiple
            of; its last axis is the tile.
        weights: key of CODES -> how weights may lie in memory.
    """
    return tuple(_on(dense, codes, kind) for codes in weights for kind in weights[codes])


def _on(dense: Callable[[str, int], Op], codes: str, kind: WeightKind) -> Op:
    if kind is WeightKind.DENSE:
        return dense(codes, 16)
    stored = _STORED[kind]
    op = dense(codes, stored.k_multiple)
    return replace(
        op,
        name=stored.name.format(dense=op.name, family=op.family),
        formula=stored.formula.format(dense=op.name),
        schema=_schema_with(op.schema, stored),
        axes=_int4_axes(op.axes) if kind is WeightKind.INT4 else op.axes,
        args=tuple(part for argument in op.args for part in _arguments(argument, stored)),
        reference=_on_dense(op.reference, stored.decode, sum(a.name in _CODES for a in op.args)),
        weights=kind,
    )


def _int4_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    int4 = format_axis("W", (INT4.name,))
    *others, tile = (int4 if axis.macro == int4.macro else axis for axis in axes)
    # Operands always go through LDS, and the fifth tile's do not.
    return (*others, replace(tile, words=tile.words[:4]))


def _schema_with(schema: str, stored: _Stored) -> str:
    for w in _CODES:
        schema = schema.replace(f"Tensor {w},", f"Tensor {w}, Tensor {w}_{stored.behind},")
    return schema


def _arguments(argument: Argument, stored: _Stored) -> tuple[Argument, ...]:
    """Return an argument, of weights two to a byte with the operand behind them."""
    if argument.name not in _CODES:
        return (argument,)
    rows = argument.shape.removeprefix("[").partition(",")[0]
    behind = Argument(f"{argument.name}_{stored.behind}", "u8", f"[{rows}, k / {stored.values}]")
    return replace(argument, shape=f"[{rows}, k / 2]"), behind


def _on_dense(dense: Callable[..., Any], decode: _Decode, weights: int) -> Callable[..., Any]:
    """Return the reference of an operation whose ``weights`` are decoded to dense ones."""

    def reference(x: Tensor, x_scale: Tensor, *others: Any, **options: Any) -> Any:
        packed, behind = others[: 2 * weights], others[2 * weights :]
        whole = map(decode, packed[::2], packed[1::2])
        decoded = (INT8.name if other == INT4.name else other for other in behind)
        return dense(x, x_scale, *whole, *decoded, **options)

    return reference


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
