"""Convolutions by the kernels of the tile menu: what they take, and their integers."""

from quantkit.device.ops import LEAST_CHANNELS, MOST_TAPS, PICTURE
from quantkit.numerics.windows import ConvShape

_INT_MAX = 2**31 - 1


def why_not(shape: ConvShape, *, sparse: bool) -> str:
    """Return why the kernels cannot compute a convolution, or should not; empty when they do."""
    if shape.windows.are_pixels:
        return "its windows are the pixels: a GEMM as it is"
    return why_refused(shape, sparse=sparse)


def why_refused(shape: ConvShape, *, sparse: bool) -> str:
    """Return why the kernels would read out of bounds; empty when they do not."""
    multiple = 32 if sparse else 16
    if shape.channels % multiple or shape.channels < LEAST_CHANNELS:
        return f"{shape.channels} channels, wanted {LEAST_CHANNELS} or more, by {multiple}"
    if shape.windows.taps > MOST_TAPS:
        return f"a window has {shape.windows.taps} taps, wanted {MOST_TAPS} at most"
    if shape.batch * shape.height * shape.width * shape.channels > _INT_MAX:
        return "more codes than 32 bits count"
    return ""


def integers(shape: ConvShape) -> dict[str, int]:
    """Return the integers among the kernels' arguments, in order."""
    windows, (tall, wide) = shape.windows, shape.outputs
    left, _, top, _ = windows.padding
    picture = (
        *(shape.height, shape.width, shape.channels, tall, wide, windows.kernel[1]),
        *(*windows.stride, *windows.dilation, top, left),
    )
    gemm = {"m": shape.batch * tall * wide, "n": shape.n, "k": shape.k}
    return {**gemm, **dict(zip(PICTURE, picture, strict=True))}
