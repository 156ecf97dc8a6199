"""Axes of operations of all kinds: formats of codes, the dtype of results, sizes."""

from quantkit.device.ops.op import Argument, Axis
from quantkit.numerics.formats import FORMATS, INT8

#: Float formats that kernels read.
FP8 = tuple(fmt.name for fmt in FORMATS.values() if not fmt.is_integer)
#: Word in an operation's name -> formats of the codes that it multiplies. A format's place in
#: FORMATS is its number in kernels/include/config.h.
CODES = {"fp8": FP8, "int8": (INT8.name,)}
IO = Axis("QK_IO", ("f16", "bf16", "f32"))

M, N, K = Argument("m", "i32"), Argument("n", "i32"), Argument("k", "i32")


def formats(of: str, kind: str) -> Axis:
    """Return the axis of the format of X, W or Y in an operation on ``kind``, a key of CODES."""
    return format_axis(of, CODES[kind])


def format_axis(of: str, names: tuple[str, ...]) -> Axis:
    """Return the axis of the format of X, W or Y; ``names`` follow each other in FORMATS."""
    return Axis(f"QK_{of}_FORMAT", names, first=list(FORMATS).index(names[0]))
