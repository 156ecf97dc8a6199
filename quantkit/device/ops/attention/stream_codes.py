"""Codes of attention's queries, keys and values, of one stream or two, in one launch."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor

from quantkit.device.ops.attention.heads import ROTARY
from quantkit.device.ops.attention.stream_operands import (
    EPS,
    OPTIONS,
    PLACES,
    PROJECTIONS,
    REQUIRES,
    SCHEMA,
    STREAM_ARGS,
    check_streams,
    sample_streams,
)
from quantkit.device.ops.attention.streams import ALIGNED, head_codes_fp8, lanes_of, value_codes_fp8
from quantkit.device.ops.axes import IO, K, M, N, format_axis
from quantkit.device.ops.checks import expect, given
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
from quantkit.errors import ShapeError
from quantkit.numerics.attention_factors import COLUMNS, RUN, padded
from quantkit.numerics.formats import E4M3FN


def stream_codes_fp8(
    first_q: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    second_q: Tensor | None,
    second_k: Tensor | None,
    second_v: Tensor | None,
    first_q_weight: Tensor | None,
    first_k_weight: Tensor | None,
    second_q_weight: Tensor | None,
    second_k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    k_mean: Tensor | None,
    q_factor: Tensor,
    k_factor: Tensor,
    v_mean: Tensor | None,
    v_scale: Tensor,
    columns: tuple[int, ...],
    heads: int,
    head_size: int,
    eps: float,
    rotary: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return e4m3fn codes of queries and keys, as ``head_codes_fp8``, and of ``value_codes_fp8``.

    Args:
        first_q: (B, T1, C1) float16, bfloat16 or float32.
        first_k: likewise.
        first_v: likewise.
        second_q: (B, T2, C2), tokens that stand behind those of the first stream, or None.
        second_k: likewise.
        second_v: likewise.
        first_q_weight: (head_size,) of the norm in the dtype of ``first_q``, or None.
        first_k_weight: likewise.
        second_q_weight: likewise.
        second_k_weight: likewise.
        cos: (T1 + T2, head_size) float32, and
        sin: of a rotation, or None.
        k_mean: (S, D) float32, D the head size up to a multiple of 16; row n of the heads has
            n % S; None: zeros.
        q_factor: (S,) float32.
        k_factor: (S,) float32.
        v_mean: (S, D) float32, or None.
        v_scale: (S, D) float32.
        columns: where the heads of first_q, first_k, first_v, second_q, second_k and second_v
            begin, multiples of 8.
        heads: of a picture.
        head_size: columns of a head, a multiple of 8.
        eps: added to the mean square, rounded to float32.
        rotary: one of ROTATIONS.

    Returns:
        queries and keys, (B * heads, T1 + T2, D) uint8, and values, (B * heads, D, pitch).
    """
    wide = [
        None if weight is None else weight.float()
        for weight in (first_q_weight, second_q_weight, first_k_weight, second_k_weight)
    ]
    where = (heads, head_size)
    q = head_codes_fp8(
        first_q, second_q, wide[0], wide[1], cos, sin, None, q_factor, columns[0], columns[3],
        *where, eps, rotary,
    )  # fmt: skip
    k = head_codes_fp8(
        first_k, second_k, wide[2], wide[3], cos, sin, k_mean, k_factor, columns[1], columns[4],
        *where, eps, rotary,
    )  # fmt: skip
    values = value_codes_fp8(first_v, second_v, v_mean, v_scale, columns[2], columns[5], *where)
    return q, k, values


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    words, sizes = check_streams(op, operands, options)
    if operands[2] is None:
        raise ShapeError(f"{op.name}: first_v is missing, expected a projection")
    rows, width = sizes["n"], padded(sizes["d"])
    scales = given(operands[13]).numel()
    if rows and (scales < 1 or rows % scales):
        raise ShapeError(f"{op.name}: numbers of {scales} heads, expected a divisor of {rows}")
    for place in range(12, 17):
        numbers, by_head = operands[place], place in (13, 14)
        if numbers is not None:
            shape = (scales,) if by_head else (scales, width)
            expect(op.name, op.args[place].name, numbers, torch.float32, shape)
    word, rotary = words
    sizes |= {"scales": scales, "k": lanes_of(width, ALIGNED)}
    return Problem((word, *op.words("QK_X_FORMAT"), rotary), sizes)


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    first, second, (_, heads, d, *_) = given(operands[0]), operands[3], options
    tokens = first.shape[1] if second is None else first.shape[1] + second.shape[1]
    rows, width = first.shape[0] * heads, padded(d)
    codes = ((rows, tokens, width), torch.uint8)
    return codes, codes, ((rows, width, padded(tokens, RUN)), torch.uint8)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    first, second, others, options = sample_streams(variant, sizes, generator)
    heads, width = options[1], padded(options[2])
    means = [torch.randn(heads, width, generator=generator) * 0.3 for _ in range(2)]
    factors = [torch.rand(heads, generator=generator) * 30 for _ in range(2)]
    scale = (torch.rand(heads, width, generator=generator) + 0.1) / 64
    return (*first, *second, *others, means[0], *factors, means[1], scale), options


_WIDTH = f"ceil_div(d, {COLUMNS}) * {COLUMNS}"
_BY_COLUMN = f"[scales, {_WIDTH}]"
_NUMBERS = "Tensor? k_mean, Tensor q_factor, Tensor k_factor, Tensor? v_mean, Tensor v_scale"
OPS = (
    Op(
        name="stream_codes_fp8",
        family="stream_codes",
        source="stream_codes.hip",
        formula="q_codes and k_codes as head_codes_fp8's q, v_codes as value_codes_fp8's v",
        schema=(
            f"(Tensor first_q, Tensor first_k, Tensor first_v, {SCHEMA}, {_NUMBERS}, {OPTIONS}) "
            "-> (Tensor, Tensor, Tensor)"
        ),
        axes=(IO, format_axis("X", (E4M3FN.name,)), ROTARY),
        args=(
            *(*PROJECTIONS, *STREAM_ARGS),
            Argument("k_mean", "f32", _BY_COLUMN, null="zeros"),
            Argument("q_factor", "f32", "[scales]"),
            Argument("k_factor", "f32", "[scales]"),
            Argument("v_mean", "f32", _BY_COLUMN, null="zeros"),
            Argument("v_scale", "f32", _BY_COLUMN),
            Argument("q_codes", "u8", f"[n, m, {_WIDTH}]", written=True),
            Argument("k_codes", "u8", f"[n, m, {_WIDTH}]", written=True),
            Argument("v_codes", "u8", f"[n, {_WIDTH}, ceil_div(m, {RUN}) * {RUN}]", written=True),
            *(M, N, K, *PLACES, Argument("scales", "i32"), EPS),
        ),
        k_multiple=1,
        check=_check,
        outputs=_outputs,
        reference=stream_codes_fp8,
        budget=Budget(
            0.0,
            0.0,
            (0.0, 0.0),
            "every operation is rounded in the same order: bytes equal torch's",
        ),
        sample=_sample,
        requires=REQUIRES,
    ),
)
