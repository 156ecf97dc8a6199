"""Convolutions by the kernels of the tile menu: what they take, and their integers."""

from quantkit.numerics.windows import ConvShape

# As kernels/include/picture.h has them.
_LEAST_CHANNELS, _MOST_TAPS = 64, 32
_INT_MAX = 2**31 - 1

#: Integers among the kernels' arguments that say what a picture is and where windows lie in it.
PICTURE = (
    *("height", "width", "channels", "out_height", "out_width", "taps_wide"),
    *("stride_y", "stride_x", "dilation_y", "dilation_x", "top", "left"),
)


def requirements(multiple: int) -> tuple[str, ...]:
    """Return what the kernels rely on, over their arguments' names.

    Args:
        multiple: of which the channels are one.
    """
    return (
        f"channels >= {_LEAST_CHANNELS}",
        f"channels % {multiple} == 0",
        "k % channels == 0",
        f"k // channels <= {_MOST_TAPS}",
        f"m // (out_height * out_width) * height * width * channels <= {_INT_MAX}",
    )


def why_not(shape: ConvShape, *, sparse: bool) -> str:
    """Return why the kernels cannot compute a convolution, or should not; empty when they do."""
    if shape.windows.are_pixels:
        return "its windows are the pixels: a GEMM as it is"
    return why_refused(shape, sparse=sparse)


def why_refused(shape: ConvShape, *, sparse: bool) -> str:
    """Return why the kernels would read out of bounds; empty when they do not."""
    multiple = 32 if sparse else 16
    if shape.channels % multiple or shape.channels < _LEAST_CHANNELS:
        return f"{shape.channels} channels, wanted {_LEAST_CHANNELS} or more, by {multiple}"
    if shape.windows.taps > _MOST_TAPS:
        return f"a window has {shape.windows.taps} taps, wanted {_MOST_TAPS} at most"
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
