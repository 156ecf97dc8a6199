"""Codes of a picture's windows, with a scale for each: the rows of a convolution's product."""

import torch
from torch import Tensor

from quantkit.device.ops.axes import CODES, IO, K, M, formats
from quantkit.device.ops.checks import IO_DTYPES, check_smoothing, given, io_word
from quantkit.device.ops.norms.quantize import EXACT, SMOOTHING, quantize_token, smooth_word
from quantkit.device.ops.op import (
    Argument,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
)
from quantkit.device.ops.products.conv import PICTURE, integers
from quantkit.errors import ShapeError
from quantkit.numerics.conv_windows import ConvShape, Windows

#: Channels that a lane loads at once.
ALIGNED = 8


def quantize_windows(
    x: Tensor, smooth: Tensor | None, windows: tuple[int, ...], fmt: str
) -> tuple[Tensor, Tensor]:
    """Return ``quantize_token`` of the windows of pictures.

    Args:
        x: (B, H, W, C) float16, bfloat16 or float32. NaN makes the scales of its windows NaN, and
            all their codes.
        smooth: (C,) float32, or None for ones.
        windows: kernel, stride, dilation and padding, as ``Windows.numbers``.
        fmt: of the codes.

    Returns:
        (M,) float32 and (M, kh * kw * C) uint8, M = B * OH * OW.
    """
    how = Windows.of(tuple(windows))
    rows = how.unfold(x)
    factors = None if smooth is None else smooth.repeat(how.taps)
    return quantize_token(rows.reshape(-1, how.taps * x.shape[3]), factors, fmt)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    (x, smooth), (windows, fmt) = operands, options
    x, how = given(x), Windows.of(tuple(windows))
    word = io_word(op.name, x.dtype)
    if x.ndim != 4 or x.shape[3] % ALIGNED:
        raise ShapeError(
            f"{op.name}: x is {tuple(x.shape)}, expected (B, H, W, C), C a multiple of {ALIGNED}"
        )
    batch, height, width, channels = x.shape
    shape = ConvShape(batch, height, width, channels, 0, how)
    if min(shape.outputs) < 1:
        raise ShapeError(f"{op.name}: no window fits into x of shape {tuple(x.shape)}: {how}")
    check_smoothing(op.name, smooth, x.shape[3], x)
    return Problem((word, fmt, smooth_word(smooth)), _numbers(shape))


def _numbers(shape: ConvShape) -> dict[str, int]:
    return {name: number for name, number in integers(shape).items() if name != "n"}


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    x, how = given(operands[0]), Windows.of(tuple(options[0]))
    batch, height, width, channels = x.shape
    tall, wide = how.outputs(height, width)
    rows = batch * tall * wide
    return ((rows,), torch.float32), ((rows, how.taps * channels), torch.uint8)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, _, k = sizes
    windows = Windows((3, 3), padding=(1, 1, 1, 1))
    channels = max(ALIGNED, k // 9 // ALIGNED * ALIGNED)
    # A row of m pixels, and one more picture than one.
    x = torch.randn(2, 1, -(-m // 2), channels, generator=generator)
    some = variant.word("QK_SMOOTH")
    smooth = torch.rand(channels, generator=generator) + 0.5 if some else None
    return (x.to(IO_DTYPES[variant.word("QK_IO")]), smooth), (
        windows.numbers,
        variant.word("QK_X_FORMAT"),
    )


_PICTURES = "m / (out_height * out_width)"


def _row(kind: str) -> Op:
    return Op(
        name=f"quantize_{kind}_windows",
        family="quantize_windows",
        source="quantize_windows.hip",
        formula=(
            f"scale and codes as quantize_{kind}_token's of windows of x: row (b, v, u), column "
            "(r, s, c) is x[b, v stride_y + r dilation_y - top, u stride_x + s dilation_x - left, "
            "c] * smooth[c], or 0 outside"
        ),
        schema="(Tensor x, Tensor? smooth, int[] windows, str x_format) -> (Tensor, Tensor)",
        axes=(IO, formats("X", kind), SMOOTHING),
        args=(
            Argument("x", "io", f"[{_PICTURES}, height, width, channels]"),
            Argument("smooth", "f32", "[channels]", null="not smoothed (variants without _smooth)"),
            Argument("scale", "f32", "[m]", written=True),
            Argument("q", "u8", "[m, k]", written=True),
            *(M, K, *(Argument(name, "i32") for name in PICTURE)),
        ),
        k_multiple=ALIGNED,
        check=_check,
        outputs=_outputs,
        reference=quantize_windows,
        budget=EXACT,
        sample=_sample,
        requires=(f"channels % {ALIGNED} == 0", "k % channels == 0", "k < 1048576"),
    )


OPS = tuple(map(_row, CODES))
