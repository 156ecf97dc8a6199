"""Inputs of packed layers as codes and their scale."""

from torch import Tensor

from quantkit.device.ops.norms.quantize import quantize_static, quantize_token
from quantkit.device.ops.products.quantize_windows import ALIGNED
from quantkit.device.torch_operators import operator_for
from quantkit.inference.layers.compiler_fuses import compiler_quantizes
from quantkit.numerics.conv_windows import Windows
from quantkit.numerics.formats import NumberFormat

#: uint8 codes of an input, (M, K) or (B, H, W, C), and their float32 scale: (), (1,) or (M,)
Coded = tuple[Tensor, Tensor]


def quantize_input(
    x: Tensor, scale: Tensor | None, smooth: Tensor | None, fmt: NumberFormat
) -> Coded:
    """Return the codes of x * smooth, and their scale.

    Args:
        x: (M, K), float16, bfloat16 or float32, contiguous.
        scale: float32, () or (1,); None: each row has its own.
        smooth: float32 (K,); None for ones.
        fmt: of the codes.
    """
    fused = compiler_quantizes(x)
    if scale is not None:
        static = quantize_static if fused else operator_for("quantize_static", fmt.name)
        return static(x, smooth, scale, fmt.name), scale
    per_token = quantize_token if fused else operator_for("quantize_token", fmt.name)
    rows_scale, codes = per_token(x, smooth, fmt.name)
    return codes, rows_scale


def quantize_windows(
    pixels: Tensor, smooth: Tensor | None, windows: Windows, fmt: NumberFormat
) -> Coded:
    """Return the codes of the windows of pixels * smooth, and a scale for each.

    Args:
        pixels: (B, H, W, C), float16, bfloat16 or float32.
        smooth: float32 (C,); None for ones.
        windows: of a convolution; there are M of K values.
        fmt: of the codes.
    """
    channels = pixels.shape[3]
    if windows.are_pixels:
        return quantize_input(pixels.reshape(-1, channels).contiguous(), None, smooth, fmt)
    if compiler_quantizes(pixels) or channels % ALIGNED:
        rows = windows.unfold(pixels).reshape(-1, windows.taps * channels)
        smooth = None if smooth is None else smooth.repeat(windows.taps)
        return quantize_input(rows, None, smooth, fmt)
    write = operator_for("quantize_windows", fmt.name)
    scale, codes = write(pixels, smooth, windows.numbers, fmt.name)
    return codes, scale
