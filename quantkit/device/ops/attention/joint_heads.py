"""Heads of attention in 16 bit from projections: norm, rotation and both streams in one pass."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from dataclasses import replace

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
from quantkit.device.ops.attention.streams import (
    ALIGNED,
    ROTATIONS,
    Streams,
    lanes_of,
    normed_and_rotated,
)
from quantkit.device.ops.axes import IO, K, M, N
from quantkit.device.ops.checks import given
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


def joint_heads(
    first_q: Tensor,
    first_k: Tensor,
    first_v: Tensor | None,
    second_q: Tensor | None,
    second_k: Tensor | None,
    second_v: Tensor | None,
    first_q_weight: Tensor | None,
    first_k_weight: Tensor | None,
    second_q_weight: Tensor | None,
    second_k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    columns: tuple[int, ...],
    heads: int,
    head_size: int,
    eps: float,
    rotary: str,
) -> Tensor:
    """Return queries, keys and, where they are given, values of all tokens, rounded once.

    Args:
        first_q: (B, T1, C1) float16, bfloat16 or float32.
        first_k: likewise.
        first_v: likewise, or None: values are not copied.
        second_q: (B, T2, C2), tokens that stand behind those of the first stream, or None.
        second_k: likewise.
        second_v: likewise.
        first_q_weight: (head_size,) in the dtype of ``first_q``: rows are divided by the root of
            their mean square and multiplied by this; None: they are not.
        first_k_weight: likewise.
        second_q_weight: likewise.
        second_k_weight: likewise.
        cos: (T1 + T2, head_size) float32, and
        sin: of a rotation, or None.
        columns: where the heads of first_q, first_k, first_v, second_q, second_k and second_v
            begin, multiples of 8.
        heads: of a picture.
        head_size: columns of a head, a multiple of 8.
        eps: added to the mean square, rounded to float32.
        rotary: one of ROTATIONS.

    Returns:
        (2 or 3, B, T1 + T2, heads, head_size): queries, keys, values.
    """
    parts = ((first_q, second_q), (first_k, second_k), (first_v, second_v))
    weights = ((first_q_weight, second_q_weight), (first_k_weight, second_k_weight), (None, None))
    turns = (((cos, sin), rotary), ((cos, sin), rotary), ((None, None), ROTATIONS[0]))
    made = [
        normed_and_rotated(
            Streams(first, second, columns[place], columns[place + 3], heads, head_size),
            tuple(None if weight is None else weight.float() for weight in of_streams),
            rotation,
            eps,
            how,
        )
        for place, ((first, second), of_streams, (rotation, how)) in enumerate(
            zip(parts, weights, turns, strict=True)
        )
        if first is not None
    ]
    return torch.stack([t.transpose(1, 2) for t in made]).to(first_q.dtype)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    words, sizes = check_streams(op, operands, options)
    return Problem(words, sizes | {"k": lanes_of(sizes["d"], ALIGNED)})


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    first, second, (_, heads, d, *_) = given(operands[0]), operands[3], options
    tokens = first.shape[1] if second is None else first.shape[1] + second.shape[1]
    parts = 2 if operands[2] is None else 3
    return (((parts, first.shape[0], tokens, heads, d), first.dtype),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    (*first, first_v), (*second, second_v), others, options = sample_streams(
        variant, sizes, generator
    )
    if sizes[1] % 2:
        # Values are left where they are.
        first_v = second_v = None
    return (*first, first_v, *second, second_v, *others), options


OPS = (
    Op(
        name="joint_heads",
        family="joint_heads",
        source="joint_heads.hip",
        formula=(
            "y[p, b, t, h, c] = rotated(x / sqrt(mean_c(x * x) + eps) * weight[c]), x that of "
            "queries (p 0) and keys (1); of values (2) x"
        ),
        schema=(
            f"(Tensor first_q, Tensor first_k, Tensor? first_v, {SCHEMA}, {OPTIONS}) -> Tensor"
        ),
        axes=(IO, ROTARY),
        args=(
            *PROJECTIONS[:2],
            replace(PROJECTIONS[2], null="no values"),
            *STREAM_ARGS,
            Argument(
                "y",
                "io",
                "[3, n // heads, m, heads, d] or [2, n // heads, m, heads, d]",
                written=True,
            ),
            *(M, N, K, *PLACES, EPS),
        ),
        k_multiple=1,
        check=_check,
        outputs=_outputs,
        reference=joint_heads,
        budget=Budget(
            0.0, 0.0, (0.0, 0.0), "every operation is rounded in the same order, as torch's"
        ),
        sample=_sample,
        requires=REQUIRES,
    ),
)
