"""What operations that multiply codes share: axes, arguments, their two kinds of weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.device.ops.checks import Weights, given
from quantkit.device.ops.op import Argument, Axis, Budget, Op, Variant
from quantkit.numerics.formats import FORMATS, find_format
from quantkit.numerics.packing import LEGAL_NIBBLES, unpack_two_of_four
from quantkit.numerics.scales import decode

#: Float formats that kernels read.
FP8 = tuple(fmt.name for fmt in FORMATS.values() if not fmt.is_integer)
#: Word in an operation's name -> formats of the codes that it multiplies. A format's place in
#: FORMATS is its number in kernels/include/config.h.
CODES = {"fp8": FP8, "int8": ("int8",)}
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


def formats(of: str, kind: str) -> Axis:
    """Return the axis of the format of X, W or Y in an operation on ``kind``, a key of CODES."""
    names = CODES[kind]
    return Axis(f"QK_{of}_FORMAT", names, first=list(FORMATS).index(names[0]))


def scales_and_bias(rows: str) -> tuple[Argument, Argument]:
    """Return the arguments behind the weights, of which there are ``rows``."""
    bias = Argument("bias", "io", f"[{rows}]", null="no bias")
    return Argument("w_scale", "f32", f"[1] or [{rows}]"), bias


def named_weights(op: Op, weights: Sequence[Tensor | None]) -> Weights:
    """Return the weights' operands as ``checks`` take them: codes, and positions of sparse ones."""
    per_byte = (("w", 2), ("w_meta", 8)) if op.sparse else (("w", 1),)
    return tuple(
        (name, given(weight), count)
        for (name, count), weight in zip(per_byte, weights, strict=True)
    )


def with_sparse(dense: Op, *, formula: str, requires: tuple[str, ...] = ()) -> tuple[Op, Op]:
    """Return an operation and its twin on 2:4 weights: kept codes, and behind them positions.

    Args:
        dense: the operation.
        formula: of the twin.
        requires: of the twin.
    """
    w = next(a for a in dense.args if a.name == "w")
    rows = w.shape.removeprefix("[").partition(",")[0]
    kept = replace(w, shape=f"[{rows}, k / 2]"), Argument("w_meta", "u8", f"[{rows}, k / 8]")
    args = tuple(part for a in dense.args for part in (kept if a is w else (a,)))
    name = f"{dense.name}_sparse"
    sparse = replace(
        dense,
        name=name,
        source=dense.source.replace(".hip", "_sparse.hip"),
        formula=formula,
        schema=dense.schema.replace("Tensor w,", "Tensor w, Tensor w_meta,"),
        args=args,
        k_multiple=32,
        reference=_on_kept(dense.reference),
        sparse=True,
        requires=requires,
    )
    return dense, sparse


def _on_kept(dense: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def sparse(
        x: Tensor, x_scale: Tensor, w: Tensor, w_meta: Tensor, *others: Any, **options: Any
    ) -> Tensor:
        return dense(x, x_scale, unpack_two_of_four(w, w_meta), *others, **options)

    return sparse


class Sample(NamedTuple):
    """Operands of a product around its input."""

    x_scale: Tensor
    #: codes, and positions of a sparse one
    weights: tuple[Tensor, ...]
    w_scale: Tensor
    bias: Tensor


def sample_codes(shape: tuple[int, ...], fmt: str, generator: torch.Generator) -> Tensor:
    """Return uniform random codes without NaN and infinity."""
    legal = torch.arange(256, dtype=torch.uint8)
    legal = legal[decode(legal, fmt).isfinite()]
    return legal[torch.randint(len(legal), shape, generator=generator)]


def sample_product(
    variant: Variant, m: int, rows: int, k: int, generator: torch.Generator
) -> Sample:
    """Return random operands of a product of M tokens and so many rows of weights."""
    fmt, op = variant.word("QK_W_FORMAT"), variant.op
    largest = find_format(fmt).max * find_format(variant.word("QK_X_FORMAT")).max
    tokens = m if variant.word("QK_X_SCALE") == "token" else 1
    channels = rows if variant.word("QK_W_SCALE") == "channel" else 1
    # Sums come into the range of float16.
    x_scale, w_scale = (
        0.5 / largest**0.5 * (0.5 + torch.rand(count, generator=generator))
        for count in (tokens, channels)
    )
    weights = [sample_codes((rows, k // 2 if op.sparse else k), fmt, generator)]
    if op.sparse:
        drawn = torch.randint(len(LEGAL_NIBBLES), (rows, k // 4), generator=generator)
        nibbles = torch.tensor(LEGAL_NIBBLES, dtype=torch.uint8)[drawn]
        weights.append(nibbles[:, ::2] | nibbles[:, 1::2] << 4)
    bias = torch.randn(rows, generator=generator)
    return Sample(x_scale, tuple(weights), w_scale, bias)
