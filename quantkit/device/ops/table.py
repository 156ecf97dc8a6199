"""The operations: what each computes, its variants, its arguments, and how exact it must be.

A variant is one compile of one source: a word per axis. Its words, joined, are its name; the index
of each word is the value of the axis' macro (kernels/include/config.h holds the same numbers).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from quantkit.device.ops import reference
from quantkit.device.ops.windows import PICTURE, requirements
from quantkit.errors import KernelError


@dataclass(frozen=True)
class Axis:
    """One choice made on the compiler's command line."""

    macro: str
    #: position in this tuple = value of the macro; an empty word leaves no trace in the name
    words: tuple[str, ...]


@dataclass(frozen=True)
class Argument:
    """One kernel argument, in launch order."""

    name: str
    #: element type of a pointer (u8, f32, io), or i32 for a number passed by value
    element: str
    #: empty for numbers
    shape: str = ""
    written: bool = False
    #: what a null pointer means; empty when null is not allowed
    null: str = ""

    @property
    def is_pointer(self) -> bool:
        """True for device memory, False for a number."""
        return bool(self.shape)


@dataclass(frozen=True)
class Budget:
    """How far a kernel may be from the exact result."""

    #: squared error over squared size, beyond the square of the output dtype's eps
    nmse: float
    #: largest error in spacings of the output, beyond what ``float32`` grants
    ulp: float
    #: granted to each output, in float32 spacings of its sum of sizes: a constant, and a factor of
    #: sqrt(K)
    float32: tuple[float, float]
    reason: str


@dataclass(frozen=True)
class Op:
    """One operation, one source file."""

    name: str
    source: str
    formula: str
    axes: tuple[Axis, ...]
    args: tuple[Argument, ...]
    #: K must be a multiple of this, else the launcher refuses
    k_multiple: int
    #: the same operation in plain PyTorch
    reference: Callable[..., object]
    budget: Budget
    #: what else the kernels rely on, over argument names; a launcher must refuse the rest
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One compile of an operation."""

    op: Op
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The words that say what was chosen, as ``e4m3fn_e4m3fn_token_channel_f16_t0``."""
        return "_".join(word for word in self.words if word)

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.op.name

    @property
    def source(self) -> str:
        """File below ``kernels``."""
        return self.op.source

    @property
    def symbol(self) -> str:
        """Name of the kernel in the object file."""
        return f"{self.op.name}_{self.name}"

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros of the command line."""
        pairs = zip(self.op.axes, self.words, strict=True)
        values = (f"-D{axis.macro}={axis.words.index(word)}" for axis, word in pairs)
        return (f"-DQK_SYMBOL={self.symbol}", *values)

    def word(self, macro: str) -> str:
        """Return the word chosen on the axis of ``macro``; empty when there is no such axis."""
        pairs = zip(self.op.axes, self.words, strict=True)
        return next((word for axis, word in pairs if axis.macro == macro), "")


_FORMATS = ("e4m3fn", "e5m2")
_IO = Axis("QK_IO", ("f16", "bf16", "f32"))
_X_FORMAT, _W_FORMAT, _Y_FORMAT = (Axis(f"QK_{of}_FORMAT", _FORMATS) for of in "XWY")
_X_SCALE = Axis("QK_X_SCALE", ("tensor", "token"))
_W_SCALE = Axis("QK_W_SCALE", ("tensor", "channel"))
#: What is done to x before: bit 0 of the index smooths, bit 1 shifts.
_INPUT = Axis("QK_INPUT", ("", "smooth", "shift", "shift_smooth"))
_TILE = Axis("QK_TILE", ("t0", "t1", "t2", "t3", "t4"))

_QUANTIZE_AXES = (_IO, _X_FORMAT, _INPUT)
_GEMM_AXES = (_X_FORMAT, _W_FORMAT, _X_SCALE, _W_SCALE, _IO, _TILE)
_GEGLU_AXES = (*_GEMM_AXES[:-1], _Y_FORMAT, _TILE)
# A pixel is part of many outputs, which share its scale; operands always go through LDS.
_CONV_AXES = (
    *(_X_FORMAT, _W_FORMAT, Axis("QK_X_SCALE", ("tensor",)), _W_SCALE, _IO),
    Axis("QK_TILE", _TILE.words[:4]),
)

_M, _N, _K = Argument("m", "i32"), Argument("n", "i32"), Argument("k", "i32")
_X = Argument("x", "io", "[m, k]")
_SMOOTH = Argument("smooth", "f32", "[k]", null="not smoothed (variants without _smooth)")
_SHIFT = Argument("shift", "f32", "[k]", null="not shifted (variants without _shift)")
_Q = Argument("q", "u8", "[m, k]", written=True)
_X_CODES = Argument("x", "u8", "[m, k]")
_X_SCALES = Argument("x_scale", "f32", "[1] or [m]")


def _gemm_args(*weights: Argument) -> tuple[Argument, ...]:
    y = Argument("y", "io", "[m, n]", written=True)
    return (_X_CODES, _X_SCALES, *weights, *_scales_and_bias("n"), y, _M, _N, _K)


def _geglu_args(*weights: Argument) -> tuple[Argument, ...]:
    y_scale, y = Argument("y_scale", "f32", "[1]"), Argument("y", "u8", "[m, n]", written=True)
    return (_X_CODES, _X_SCALES, *weights, *_scales_and_bias("2 n"), y_scale, y, _M, _N, _K)


def _conv_args(*weights: Argument) -> tuple[Argument, ...]:
    x = Argument("x", "u8", "[m / (out_height * out_width), height, width, channels]")
    y = Argument("y", "io", "[m / (out_height * out_width), out_height, out_width, n]", True)
    numbers = (_M, _N, _K, *(Argument(name, "i32") for name in PICTURE))
    x_scale = Argument("x_scale", "f32", "[1]")
    return (x, x_scale, *weights, *_scales_and_bias("n"), y, *numbers)


def _scales_and_bias(rows: str) -> tuple[Argument, Argument]:
    bias = Argument("bias", "io", f"[{rows}]", null="no bias")
    return Argument("w_scale", "f32", f"[1] or [{rows}]"), bias


def _twins(
    name: str,
    args: Callable[..., tuple[Argument, ...]],
    *,
    axes: tuple[Axis, ...],
    rows: str = "n",
    formula: str,
    sparse_formula: str,
    references: tuple[Callable[..., object], Callable[..., object]],
    budget: Budget,
    pictures: bool = False,
) -> tuple[Op, Op]:
    """Return an operation on dense weights, and on 2:4 ones."""
    sparse, (dense_reference, sparse_reference) = f"{name}_sparse", references
    w, meta = Argument("w", "u8", f"[{rows}, k]"), Argument("w_meta", "u8", f"[{rows}, k / 8]")
    of = [requirements(multiple) if pictures else () for multiple in (16, 32)]
    given, kept = args(w), args(Argument("w", "u8", f"[{rows}, k / 2]"), meta)
    return (
        Op(name, f"{name}.hip", formula, axes, given, 16, dense_reference, budget, of[0]),
        Op(
            sparse, f"{sparse}.hip", sparse_formula, axes, kept, 32, sparse_reference, budget, of[1]
        ),
    )


_EXACT = Budget(
    0.0, 0.0, (0.0, 0.0), "divide, clamp and round are exact operations: bytes equal torch's"
)
_GATED = Budget(
    0.0,
    0.0,
    (0.0, 0.0),
    "gelu is within 1.8e-4 of its value, 1.2e-7 where that is smaller: a code is the nearest of a "
    "number so near",
)
_SUMMED = Budget(
    1e-11,
    0.501,
    (1.5, 1.0),
    "one rounding to the output; in float32, half a spacing for each of two scales and the bias, "
    "and 3.5 sigma of a random walk of K roundings for sums of exact products in another order",
)

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            name="quantize_fp8_static",
            source="quantize_fp8_static.hip",
            formula="q[i, j] = fp8(clamp((x[i, j] - shift[j]) * smooth[j] / scale[0], -max, max))",
            axes=_QUANTIZE_AXES,
            args=(_X, _SMOOTH, _SHIFT, Argument("scale", "f32", "[1]"), _Q, _M, _K),
            k_multiple=1,
            reference=reference.quantize_static,
            budget=_EXACT,
        ),
        Op(
            name="quantize_fp8_token",
            source="quantize_fp8_token.hip",
            formula=(
                "scale[i] = amax_j(|(x[i, j] - shift[j]) * smooth[j]|) / max, or 1 if that is 0; "
                "q[i, j] = fp8(clamp((x[i, j] - shift[j]) * smooth[j] / scale[i], -max, max))"
            ),
            axes=_QUANTIZE_AXES,
            args=(_X, _SMOOTH, _SHIFT, Argument("scale", "f32", "[m]", written=True), _Q, _M, _K),
            k_multiple=1,
            reference=reference.quantize_token,
            budget=_EXACT,
        ),
        *_twins(
            "gemm_fp8",
            _gemm_args,
            axes=_GEMM_AXES,
            formula="y[i, j] = sum_k(x[i, k] * w[j, k]) * x_scale[i] * w_scale[j] + bias[j]",
            sparse_formula=(
                "y[i, j] = sum_k(x[i, k] * dense(w, w_meta)[j, k]) * x_scale[i] * w_scale[j] "
                "+ bias[j]; nibble g of a row of w_meta holds the positions of w[j, 2g], "
                "w[j, 2g + 1] in columns 4g to 4g + 3 (bits 1:0 and 3:2)"
            ),
            references=(reference.gemm, reference.gemm_sparse),
            budget=_SUMMED,
        ),
        *_twins(
            "geglu_fp8",
            _geglu_args,
            axes=_GEGLU_AXES,
            rows="2 n",
            formula=(
                "y[i, j] = fp8(clamp(p[i, j] * gelu(p[i, n + j]) / y_scale[0], -max, max)), "
                "p gemm_fp8's y of 2 n columns"
            ),
            sparse_formula="geglu_fp8 of gemm_fp8_sparse's y",
            references=(reference.geglu, reference.geglu_sparse),
            budget=_GATED,
        ),
        *_twins(
            "conv_fp8",
            _conv_args,
            axes=_CONV_AXES,
            formula=(
                "gemm_fp8 of windows of x: row (b, v, u), column (r, s, c) is x[b, v stride_y + "
                "r dilation_y - top, u stride_x + s dilation_x - left, c], or 0 outside of x"
            ),
            sparse_formula="gemm_fp8_sparse of conv_fp8's windows",
            references=(reference.conv, reference.conv_sparse),
            budget=_SUMMED,
            pictures=True,
        ),
    )
}


def find_op(name: str) -> Op:
    """Return the operation called ``name``.

    Raises:
        KernelError: there is none.
    """
    if name not in OPS:
        raise KernelError(f"operation {name!r}: unknown, wanted one of {', '.join(OPS)}")
    return OPS[name]


def all_variants(op: Op) -> Iterator[Variant]:
    """Yield every combination of the operation's axes."""
    for words in product(*(axis.words for axis in op.axes)):
        yield Variant(op, words)


def default_variants() -> tuple[Variant, ...]:
    """Return what an inference program needs: e4m3fn codes, 16-bit input and output."""
    every = (v for op in OPS.values() for v in all_variants(op))
    return tuple(v for v in every if "e5m2" not in v.words and v.word("QK_IO") != "f32")
