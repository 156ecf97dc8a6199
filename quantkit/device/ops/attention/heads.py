"""Codes of attention's heads from projections: norm, rotation, mean and factor in one pass."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantkit.device.ops.attention.coded_attention import PV_AXES
from quantkit.device.ops.attention.streams import (
    ALIGNED,
    ROTATIONS,
    Streams,
    head_codes_fp8,
    head_codes_int8,
    lanes_of,
    value_codes_f16,
    value_codes_fp8,
)
from quantkit.device.ops.axes import IO, K, M, N, format_axis
from quantkit.device.ops.checks import IO_DTYPES, check_device, eps_bits, expect, given, io_word
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
from quantkit.numerics.attention_factors import COLUMNS, KEYS, RUN, padded
from quantkit.numerics.attention_limits import LARGEST_HEAD, takes_heads
from quantkit.numerics.formats import E4M3FN, INT8

ROTARY = Axis("QK_ROTARY", ROTATIONS)


def _check_heads(op: Op, operands: Operands, options: Options) -> Problem:
    first, second, first_weight, second_weight, cos, sin, mean, factor = operands
    first_column, second_column, heads, d, eps, rotary, *group = options
    streams = Streams(given(first), second, first_column, second_column, heads, d)
    word, scales = _check_streams(op.name, streams, mean, given(factor))
    expect(op.name, "factor", given(factor), torch.float32, (scales,))
    for name, weight in (("first_weight", first_weight), ("second_weight", second_weight)):
        if weight is not None:
            expect(op.name, name, weight, torch.float32, (d,))
    check_rotation(op.name, streams, (cos, sin), rotary)
    if group and group[0] not in (1, KEYS):
        raise KernelError(f"{op.name}: groups of {group[0]} tokens, expected 1 or {KEYS}")
    _check_devices(op, operands)
    words = (word, op.words("QK_X_FORMAT")[0], rotary)
    numbers = streams.numbers | {"scales": scales, "eps": eps_bits(op.name, eps)}
    sizes = {"m": streams.tokens, "n": streams.rows, "k": lanes_of(d)} | numbers
    return Problem(words, sizes | dict(zip(("group",), group, strict=False)))


def _check_values(op: Op, operands: Operands, options: Options) -> Problem:
    first, second, mean, scale = operands
    streams = Streams(given(first), second, *options)
    word, scales = _check_streams(op.name, streams, mean, given(scale))
    columns = padded(streams.head_size)
    expect(op.name, "scale", given(scale), torch.float32, (scales, columns))
    _check_devices(op, operands)
    sizes = {"m": streams.tokens, "n": streams.rows, "k": columns, "scales": scales}
    words = (word, *op.words("QK_X_FORMAT"), *op.words("QK_PV"))
    return Problem(words, sizes | streams.numbers)


def _check_streams(
    op: str, streams: Streams, mean: Tensor | None, numbers: Tensor
) -> tuple[str, int]:
    """Return the word of the inputs' dtype, and how many rows share their numbers."""
    first, second, heads, d = streams.first, streams.second, streams.heads, streams.head_size
    word = io_word(op, first.dtype)
    if not takes_heads(d):
        raise ShapeError(
            f"{op}: head_size {d}, expected a multiple of {ALIGNED} up to {LARGEST_HEAD}"
        )
    if heads < 1:
        raise ShapeError(f"{op}: {heads} heads, expected 1 or more")
    places = (("first", first, streams.first_column), ("second", second, streams.second_column))
    for name, x, column in places:
        if x is not None:
            check_projection(op, name, x, first, column, heads * d)
    scales = numbers.shape[0] if numbers.ndim else 0
    if streams.rows and (scales < 1 or streams.rows % scales):
        raise ShapeError(f"{op}: numbers of {scales} heads, expected a divisor of {streams.rows}")
    if mean is not None:
        expect(op, "mean", mean, torch.float32, (scales, padded(d)))
    return word, scales


def check_projection(op: str, name: str, x: Tensor, first: Tensor, column: int, width: int) -> None:
    """Refuse a projection unlike the first, or without columns for heads of a width in all."""
    if x.ndim != 3 or x.shape[0] != first.shape[0] or x.dtype != first.dtype:
        raise ShapeError(
            f"{op}: {name} is {x.dtype} of shape {tuple(x.shape)}, expected {first.dtype} "
            f"({first.shape[0]}, tokens, columns)"
        )
    if x.shape[2] % ALIGNED or column % ALIGNED or not 0 <= column <= x.shape[2] - width:
        raise ShapeError(
            f"{op}: heads at columns {column} to {column + width} of the {x.shape[2]} of {name}, "
            f"expected columns that it has, by {ALIGNED}"
        )


def check_rotation(
    op: str, streams: Streams, rotation: Sequence[Tensor | None], rotary: str
) -> None:
    """Refuse cosines and sines that are not those of a rotation of all tokens."""
    if rotary not in ROTATIONS:
        raise KernelError(f"{op}: rotary {rotary!r}, expected one of {', '.join(ROTATIONS)}")
    for name, numbers in zip(("cos", "sin"), rotation, strict=True):
        if (numbers is None) != (rotary == ROTATIONS[0]):
            raise KernelError(f"{op}: {name} belongs to a rotation, and to that alone")
        if numbers is not None:
            shape = (streams.tokens, streams.head_size)
            expect(op, name, numbers, torch.float32, shape)
    if rotary == "halves" and streams.head_size % (2 * ALIGNED):
        raise ShapeError(
            f"{op}: halves of {streams.head_size} columns, expected a multiple of {2 * ALIGNED}"
        )


def _check_devices(op: Op, operands: Operands) -> None:
    for argument, tensor in zip(op.args, operands, strict=False):
        if tensor is not None:
            check_device(op.name, argument.name, tensor, given(operands[0]))


def _shape(operands: Operands, options: Options) -> tuple[int, int, int]:
    """Return rows of heads, tokens and padded columns; tokens may be symbolic."""
    first, second, (heads, d) = given(operands[0]), operands[1], options[2:4]
    tokens = first.shape[1] if second is None else first.shape[1] + second.shape[1]
    return first.shape[0] * heads, tokens, padded(d)


def _codes(operands: Operands, options: Options) -> tuple[Output, ...]:
    return ((_shape(operands, options), torch.uint8),)


def _codes_and_scales(operands: Operands, options: Options) -> tuple[Output, ...]:
    rows, tokens, columns = _shape(operands, options)
    groups = padded(tokens, options[-1]) // options[-1]
    return ((rows, tokens, columns), torch.uint8), ((rows, groups), torch.float32)


def _transposed(
    operands: Operands, options: Options, *, dtype: torch.dtype = torch.uint8
) -> tuple[Output, ...]:
    rows, tokens, columns = _shape(operands, options)
    return (((rows, columns, padded(tokens, RUN)), dtype),)


@dataclass(frozen=True, eq=False)
class _Sampled:
    """Random streams of two pictures with three heads."""

    operands: tuple[Tensor, Tensor | None]
    options: tuple[int, int, int, int]

    @classmethod
    def of(
        cls, variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
    ) -> "_Sampled":
        m, n, k = sizes
        dtype, heads = IO_DTYPES[variant.word("QK_IO")], 3
        d = 2 * ALIGNED * (1 + k // 32 % 10) - (ALIGNED if n % 3 == 0 and _pairs(variant) else 0)
        behind = m // 3

        def stream(tokens: int, beside: int) -> Tensor:
            x = torch.randn(2, tokens, heads * d + beside, generator=generator)
            return (1.5 * x + 0.5).to(dtype)

        second = stream(behind, 2 * ALIGNED) if behind else None
        columns = (0, ALIGNED) if second is not None else (0, 0)
        return cls((stream(m - behind, 0), second), (*columns, heads, d))

    @property
    def tokens(self) -> int:
        return sum(t.shape[1] for t in self.operands if t is not None)


def _pairs(variant: Variant) -> bool:
    return variant.word("QK_ROTARY") != "halves"


def _sample_heads(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    drawn = _Sampled.of(variant, sizes, generator)
    *_, heads, d = drawn.options
    rotary = variant.word("QK_ROTARY")
    cos = sin = None
    if rotary != ROTATIONS[0]:
        angle = torch.rand(drawn.tokens, d, generator=generator) * 6.3
        cos, sin = angle.cos(), angle.sin()
    weight = torch.rand(d, generator=generator) + 0.5
    behind = None if drawn.operands[1] is None else weight.flip(0)
    mean = torch.randn(heads, padded(d), generator=generator) * 0.3
    factor = torch.rand(heads, generator=generator) * 30
    operands = (*drawn.operands, weight, behind, cos, sin, mean, factor)
    group = (KEYS if sizes[1] % 2 else 1,) if variant.word("QK_X_FORMAT") == INT8.name else ()
    return operands, (*drawn.options, 1e-6, rotary, *group)


def _sample_values(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    drawn = _Sampled.of(variant, sizes, generator)
    *_, heads, d = drawn.options
    mean = torch.randn(heads, padded(d), generator=generator) * 0.3
    scale = (torch.rand(heads, padded(d), generator=generator) + 0.1) / 64
    return (*drawn.operands, mean, scale), drawn.options


_EXACT = Budget(
    0.0, 0.0, (0.0, 0.0), "every operation is rounded in the same order: bytes equal torch's"
)
_FIRST = Argument("first", "io", "[n // heads, first_tokens, first_pitch]")
_SECOND = Argument(
    "second", "io", "[n // heads, m - first_tokens, second_pitch]", null="there is one stream"
)
_PLACES = tuple(
    Argument(name, "i32")
    for name in (
        "first_tokens", "first_pitch", "first_column", "second_pitch", "second_column", "heads",
        "d", "scales",
    )
)  # fmt: skip
_WIDTH = f"ceil_div(d, {COLUMNS}) * {COLUMNS}"
_MEAN = Argument("mean", "f32", f"[scales, {_WIDTH}]", null="zeros")
_REQUIRES = (
    f"d % {ALIGNED} == 0",
    f"d <= {LARGEST_HEAD}",
    "n % heads == 0",
    *(f"{name} % {ALIGNED} == 0" for name in ("first_pitch", "first_column")),
    *(f"{name} % {ALIGNED} == 0" for name in ("second_pitch", "second_column")),
)
_STREAMS = "Tensor first, Tensor? second"
_WHERE = "int first_column, int second_column, int heads, int head_size"
_HEADS = (
    f"({_STREAMS}, Tensor? first_weight, Tensor? second_weight, Tensor? cos, Tensor? sin, "
    f"Tensor? mean, Tensor factor, {_WHERE}, float eps, str rotary"
)
_VALUE = (
    "(rotated(x / sqrt(mean_c(x * x) + eps) * weight[c])[n, t, c] - mean[n % scales, c]) * "
    "factor[n % scales]"
)
_NORM = "no norm"
_WITHOUT = "no rotation (variants with _none)"
_HEAD_ARGS = (
    _FIRST,
    _SECOND,
    Argument("first_weight", "f32", "[d]", null=_NORM),
    Argument("second_weight", "f32", "[d]", null=_NORM),
    Argument("cos", "f32", "[m, d]", null=_WITHOUT),
    Argument("sin", "f32", "[m, d]", null=_WITHOUT),
    _MEAN,
    Argument("factor", "f32", "[scales]"),
    Argument("q", "u8", f"[n, m, {_WIDTH}]", written=True),
)
_EPS = Argument("eps", "i32")


def _values_in(pv: str) -> str:
    return (
        f"v[n, c, t] = {pv}(clamp((x[n, t, c] - mean[n % scales, c]) * "
        "(1 / scale[n % scales, c]), -max, max))"
    )


_VALUES = Op(
    name="value_codes_fp8",
    family="value_codes",
    source="value_codes.hip",
    formula=_values_in(E4M3FN.name),
    schema=f"({_STREAMS}, Tensor? mean, Tensor scale, {_WHERE}) -> Tensor",
    axes=(IO, format_axis("X", (E4M3FN.name,)), PV_AXES[E4M3FN.name]),
    args=(
        *(_FIRST, _SECOND, _MEAN, Argument("scale", "f32", f"[scales, {_WIDTH}]")),
        Argument("v", "u8", f"[n, k, ceil_div(m, {RUN}) * {RUN}]", written=True),
        *(M, N, K, *_PLACES),
    ),
    k_multiple=COLUMNS,
    check=_check_values,
    outputs=_transposed,
    reference=value_codes_fp8,
    budget=_EXACT,
    sample=_sample_values,
    requires=_REQUIRES,
)
OPS = (
    Op(
        name="head_codes_fp8",
        family="head_codes",
        source="head_codes.hip",
        formula=f"q[n, t, c] = {E4M3FN.name}(clamp({_VALUE}, -max, max))",
        schema=f"{_HEADS}) -> Tensor",
        axes=(IO, format_axis("X", (E4M3FN.name,)), ROTARY),
        args=(*_HEAD_ARGS, M, N, K, *_PLACES, _EPS),
        k_multiple=1,
        check=_check_heads,
        outputs=_codes,
        reference=head_codes_fp8,
        budget=_EXACT,
        sample=_sample_heads,
        requires=_REQUIRES,
    ),
    Op(
        name="head_codes_int8",
        family="head_codes",
        source="head_codes_int8.hip",
        formula=(
            f"scale[n, g] = amax({_VALUE} over t / group == g) / max, or 1 if that is 0; "
            "q[n, t, c] = int8(the same / scale[n, t / group])"
        ),
        schema=f"{_HEADS}, int group) -> (Tensor, Tensor)",
        axes=(IO, format_axis("X", (INT8.name,)), ROTARY),
        args=(
            *_HEAD_ARGS,
            Argument("scale", "f32", "[n, ceil_div(m, group)]", written=True),
            *(M, N, K, *_PLACES, _EPS, Argument("group", "i32")),
        ),
        k_multiple=1,
        check=_check_heads,
        outputs=_codes_and_scales,
        reference=head_codes_int8,
        budget=_EXACT,
        sample=_sample_heads,
        requires=(*_REQUIRES, "group == 1 or group == 16"),
    ),
    _VALUES,
    replace(
        _VALUES,
        name="value_codes_f16",
        family="value_codes_f16",
        formula=_values_in("float16"),
        axes=(IO, PV_AXES[None]),
        args=tuple(replace(a, element="f16") if a.written else a for a in _VALUES.args),
        outputs=partial(_transposed, dtype=torch.float16),
        reference=value_codes_f16,
    ),
)
