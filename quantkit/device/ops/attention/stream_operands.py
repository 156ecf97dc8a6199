"""Operands of kernels that read two streams' projections: schema, arguments, checks, sample."""

import torch
from torch import Tensor

from quantkit.device.ops.attention.heads import check_rotation
from quantkit.device.ops.attention.streams import ALIGNED, ROTATIONS, Streams
from quantkit.device.ops.checks import IO_DTYPES, check_device, eps_bits, expect, given, io_word
from quantkit.device.ops.op import Argument, Op, Operands, Options, Variant
from quantkit.errors import ShapeError
from quantkit.numerics.attention_limits import LARGEST_HEAD, takes_heads

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
    if not takes_heads(d) or heads < 1 or len(columns) != len(_COLUMNS):
        raise ShapeError(
            f"{op}: {heads} heads of {d} from columns {list(columns)} on, expected heads of a "
            f"multiple of {ALIGNED} up to {LARGEST_HEAD}, from {len(_COLUMNS)} columns on"
        )


def _check_part(
    op: Op, place: int, operands: Operands, stream: Tensor | None, columns: tuple[int, int]
) -> None:
    """Refuse a projection that is not as wide and long as its stream's queries."""
    name, x, (column, width) = op.args[place].name, operands[place], columns
    missing = stream is None or (place % 3 == 2 and operands[2] is None)
    if (x is None) != missing:
        found, expected = ("given", "none") if missing else ("missing", "a projection")
        raise ShapeError(f"{op.name}: {name} is {found}, expected {expected}")
    if x is None or stream is None:
        return
    if x.ndim != 3:
        raise ShapeError(f"{op.name}: {name} has shape {tuple(x.shape)}, expected (B, T, C)")
    first = given(operands[0])
    expect(op.name, name, x, first.dtype, (first.shape[0], *stream.shape[1:]))
    if x.shape[2] % ALIGNED or column % ALIGNED or not 0 <= column <= x.shape[2] - width:
        raise ShapeError(
            f"{op.name}: heads at columns {column} to {column + width} of the {x.shape[2]} of "
            f"{name}, expected columns that it has, by {ALIGNED}"
        )


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
