"""Heads of attention in 16 bit from projections: norm, rotation and both streams in one pass."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.device.ops.attention import LARGEST_HEAD
from quantkit.device.ops.checks import IO_DTYPES, check_device, eps_bits, expect, given, io_word
from quantkit.device.ops.heads import ROTARY, check_rotation
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
from quantkit.device.ops.products import IO, K, M, N
from quantkit.device.ops.streams import ALIGNED, ROTATIONS, Streams, lanes_of, normed_and_rotated
from quantkit.errors import ShapeError


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


def check_streams(
    op: Op, operands: Operands, options: Options
) -> tuple[tuple[str, str], dict[str, int]]:
    """Refuse operands of two streams' projections, norms and rotation that do not fit together.

    Returns:
        the words of dtype and rotation, and the integers among the arguments, but for k.
    """
    columns, heads, d, eps, rotary = options
    first, second = given(operands[0]), operands[3]
    word = io_word(op.name, first.dtype)
    _check_shape(op.name, columns, heads, d)
    for place in range(6):
        stream = first if place < 3 else second
        _check_part(op, place, operands, stream, (columns[place], heads * d))
    for argument, weight in zip(op.args[6:10], operands[6:10], strict=True):
        if weight is not None:
            expect(op.name, argument.name, weight, first.dtype, (d,))
    streams = Streams(first, second, 0, 0, heads, d)
    check_rotation(op.name, streams, operands[10:12], rotary)
    for argument, tensor in zip(op.args, operands, strict=False):
        if tensor is not None:
            check_device(op.name, argument.name, tensor, first)
    sizes = {
        "m": streams.tokens, "n": streams.rows,
        "first_tokens": first.shape[1], "first_pitch": first.shape[2],
        "second_pitch": 0 if second is None else second.shape[2],
        **dict(zip(_COLUMNS, columns, strict=True)), "heads": heads, "d": d,
        "eps": eps_bits(op.name, eps),
    }  # fmt: skip
    return (word, rotary), sizes


def _check_shape(op: str, columns: tuple[int, ...], heads: int, d: int) -> None:
    if not 0 < d <= LARGEST_HEAD or d % ALIGNED or heads < 1 or len(columns) != len(_COLUMNS):
        raise ShapeError(
            f"{op}: {heads} heads of {d} from columns {list(columns)} on, wanted heads of a "
            f"multiple of {ALIGNED} up to {LARGEST_HEAD}, from {len(_COLUMNS)} columns on"
        )


def _check_part(
    op: Op, place: int, operands: Operands, stream: Tensor | None, columns: tuple[int, int]
) -> None:
    """Refuse a projection that is not as wide and long as its stream's queries."""
    name, x, (column, width) = op.args[place].name, operands[place], columns
    missing = stream is None or (place % 3 == 2 and operands[2] is None)
    if (x is None) != missing:
        found, wanted = ("given", "none") if missing else ("missing", "a projection")
        raise ShapeError(f"{op.name}: {name} is {found}, wanted {wanted}")
    if x is None or stream is None:
        return
    if x.ndim != 3:
        raise ShapeError(f"{op.name}: {name} has shape {tuple(x.shape)}, wanted (B, T, C)")
    first = given(operands[0])
    expect(op.name, name, x, first.dtype, (first.shape[0], *stream.shape[1:]))
    if x.shape[2] % ALIGNED or column % ALIGNED or not 0 <= column <= x.shape[2] - width:
        raise ShapeError(
            f"{op.name}: heads at columns {column} to {column + width} of the {x.shape[2]} of "
            f"{name}, wanted columns that it has, by {ALIGNED}"
        )


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


def sample_streams(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[list[Tensor | None], list[Tensor | None], Operands, Options]:
    """Return projections of two pictures' streams, their norms and rotation, and the options."""
    m, n, k = sizes
    dtype, rotary, heads = IO_DTYPES[variant.word("QK_IO")], variant.word("QK_ROTARY"), 3
    odd = ALIGNED if n % 3 == 0 and rotary != "halves" else 0
    d, behind = 2 * ALIGNED * (1 + k // 32 % 10) - odd, m // 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    first: list[Tensor | None] = [normal(2, m - behind, heads * d + ALIGNED) for _ in range(3)]
    second = [normal(2, behind, heads * d) if behind else None for _ in range(3)]
    weights = [normal(d), normal(d), *(normal(d) if behind else None for _ in range(2))]
    angle = torch.rand(m, d, generator=generator) * 6.3
    turn = (None, None) if rotary == ROTATIONS[0] else (angle.cos(), angle.sin())
    columns = (0, ALIGNED, 0, 0, 0, 0)
    return first, second, (*weights, *turn), (columns, heads, d, 1e-6, rotary)


_COLUMNS = ("c_fq", "c_fk", "c_fv", "c_sq", "c_sk", "c_sv")
_PARTS = ("q", "k", "v")
_FIRST = "[n // heads, first_tokens, first_pitch]"
_SECOND = "[n // heads, m - first_tokens, second_pitch]"
_TURN = "no rotation (variants with _none)"
SCHEMA = (
    "Tensor? second_q, Tensor? second_k, Tensor? second_v, Tensor? first_q_weight, "
    "Tensor? first_k_weight, Tensor? second_q_weight, Tensor? second_k_weight, Tensor? cos, "
    "Tensor? sin"
)
OPTIONS = "int[] columns, int heads, int head_size, float eps, str rotary"
#: Arguments behind those of the first stream's projections.
STREAM_ARGS = (
    *(Argument(f"second_{part}", "io", _SECOND, null="there is one stream") for part in _PARTS),
    *(
        Argument(f"{stream}_{part}_weight", "io", "[d]", null="no norm")
        for stream in ("first", "second")
        for part in _PARTS[:2]
    ),
    Argument("cos", "f32", "[m, d]", null=_TURN),
    Argument("sin", "f32", "[m, d]", null=_TURN),
)
PROJECTIONS = tuple(Argument(f"first_{part}", "io", _FIRST) for part in _PARTS)
PLACES = tuple(
    Argument(name, "i32")
    for name in ("first_tokens", "first_pitch", "second_pitch", *_COLUMNS, "heads", "d")
)
EPS = Argument("eps", "i32")
REQUIRES = (
    f"d % {ALIGNED} == 0",
    f"d <= {LARGEST_HEAD}",
    "n % heads == 0",
    *(f"{name} % {ALIGNED} == 0" for name in ("first_pitch", "second_pitch", *_COLUMNS)),
)
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
            Argument("y", "io", "[3, n // heads, m, heads, d]", written=True),
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
