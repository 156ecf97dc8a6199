"""Convolutions on codes: kernels that read windows where they lie; else unfolded for a GEMM."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor

from quantkit.device.ops.axes import IO, K, M, N, formats
from quantkit.device.ops.checks import IO_DTYPES, check_conv, given, io_word, scale_words
from quantkit.device.ops.op import (
    Argument,
    Axis,
    Detour,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Sizes,
    Variant,
)
from quantkit.device.ops.products import gemm as products_of_rows
from quantkit.device.ops.products.gemm import gemm
from quantkit.device.ops.products.residual import SUFFIX, with_residual
from quantkit.device.ops.products.stored_weights import (
    SUMMED,
    TILE,
    W_SCALE_AXIS,
    named_weights,
    products,
    sample_product,
    scales_and_bias,
)
from quantkit.numerics.conv_windows import ConvShape, Windows

# As kernels/include/picture.h has them.
_LEAST_CHANNELS, _MOST_TAPS = 64, 32
_INT_MAX = 2**31 - 1

#: Integers among the kernels' arguments that say what a picture is and where windows lie in it.
PICTURE = (
    *("height", "width", "channels", "out_height", "out_width", "taps_wide"),
    *("stride_y", "stride_x", "dilation_y", "dilation_x", "top", "left"),
)


def conv(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    windows: tuple[int, ...],
    x_format: str,
    w_format: str,
    dtype: torch.dtype,
    *,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``gemm`` of the windows of pictures.

    Args:
        x: (B, H, W, C) uint8 codes; padding is the code 0.
        x_scale: float32, one element.
        w: (N, kh * kw * C) uint8 codes, channels last in a row.
        w_scale: float32, one element, (N,), or (N, groups) with a scale per group along a row.
        bias: (N,) any float dtype, or None.
        windows: kernel, stride, dilation and padding, as ``Windows.numbers``.
        x_format: of x.
        w_format: of w.
        dtype: of the result.
        precision: of products and sums.

    Returns:
        (B, OH, OW, N) in ``dtype``.
    """
    rows = Windows.of(windows).unfold(x)
    kinds, flat = (x_format, w_format), rows.reshape(-1, w.shape[1])
    y = gemm(flat, x_scale, w, w_scale, bias, *kinds, dtype, precision=precision)
    return y.reshape(*rows.shape[:3], w.shape[0])


def why_not(op: Op, sizes: Sizes) -> str:
    """Return why the kernels cannot compute a convolution, or should not; empty when they do."""
    assert isinstance(sizes, ConvShape)
    if sizes.windows.are_pixels:
        return "its windows are the pixels: a GEMM as it is"
    return why_refused(op, sizes)


def why_refused(op: Op, shape: ConvShape) -> str:
    """Return why the kernels would read out of bounds; empty when they do not."""
    multiple = op.k_multiple
    if shape.channels % multiple or shape.channels < _LEAST_CHANNELS:
        return f"{shape.channels} channels, expected {_LEAST_CHANNELS} or more, by {multiple}"
    if shape.windows.taps > _MOST_TAPS:
        return f"a window has {shape.windows.taps} taps, expected {_MOST_TAPS} at most"
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
    rows = {"m": shape.batch * tall * wide, "n": shape.n, "k": shape.k}
    return {**rows, **dict(zip(PICTURE, picture, strict=True))}


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    x, x_scale, *weights, w_scale, bias = operands
    windows, x_format, w_format, dtype = options
    x, x_scale, w_scale = given(x), given(x_scale), given(w_scale)
    named, how = named_weights(op, weights), Windows.of(windows)
    shape = check_conv(op.name, x, x_scale, named, w_scale, bias, dtype, how)
    words = (x_format, w_format, *scale_words(x_scale, w_scale), io_word(op.name, dtype))
    return Problem(words, shape, group_scales=w_scale.ndim == 2)


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    (x, _, w, *_), (windows, *_, dtype) = operands, options
    batch, height, width, _ = given(x).shape
    tall, wide = Windows.of(tuple(windows)).outputs(height, width)
    return (((batch, tall, wide, given(w).shape[0]), dtype),)


def _unfold(op: Op, operands: Operands, options: Options) -> Detour:
    (x, *others), (windows, *how) = operands, options
    rows = Windows.of(windows).unfold(given(x))
    ((shape, _),) = _outputs(operands, options)
    flat = rows.reshape(-1, rows.shape[3:].numel())
    if op.name.endswith(SUFFIX):
        *others, residual = others
        others.append(given(residual).flatten(0, 2))
    name = op.name.replace("conv", "gemm")
    multiply = next(row for row in products_of_rows.OPS if row.name == name)
    return Detour(multiply, (flat, *others), tuple(how), shape)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    kinds = (variant.word(f"QK_{of}_FORMAT") for of in "XW")
    windows = Windows((3, 3), padding=(1, 1, 1, 1))
    channels = max(_LEAST_CHANNELS, k // 9 // 32 * 32)
    # A row of m pixels, and one more picture than one.
    shape = (2, 1, -(-m // 2), channels)
    operands = sample_product(variant, shape, n, 9 * channels, generator)
    return operands, (windows.numbers, *kinds, IO_DTYPES[variant.word("QK_IO")])


def _requirements(multiple: int) -> tuple[str, ...]:
    return (
        f"channels >= {_LEAST_CHANNELS}",
        f"channels % {multiple} == 0",
        "k % channels == 0",
        f"k // channels <= {_MOST_TAPS}",
        f"m // (out_height * out_width) * height * width * channels <= {_INT_MAX}",
    )


_PICTURES = "m / (out_height * out_width)"


def _dense(kind: str, k_multiple: int) -> Op:
    return Op(
        name=f"conv_{kind}",
        family="conv",
        source="conv.hip",
        formula=(
            f"gemm_{kind} of windows of x: row (b, v, u), column (r, s, c) is x[b, v "
            "stride_y + r dilation_y - top, u stride_x + s dilation_x - left, c], or 0 outside"
        ),
        schema=(
            "(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, int[] windows, "
            "str x_format, str w_format, ScalarType dtype) -> Tensor"
        ),
        axes=(
            *(formats("X", kind), formats("W", kind)),
            # A pixel is part of many outputs, which share its scale.
            Axis("QK_X_SCALE", ("tensor",)),
            *(W_SCALE_AXIS, IO),
            # Operands always go through LDS, and the fifth tile's do not.
            Axis(TILE.macro, TILE.words[:4]),
        ),
        args=(
            Argument("x", "u8", f"[{_PICTURES}, height, width, channels]"),
            Argument("x_scale", "f32", "[1]"),
            *(Argument("w", "u8", "[n, k]"), *scales_and_bias("n")),
            Argument("y", "io", f"[{_PICTURES}, out_height, out_width, n]", written=True),
            *(M, N, K, *(Argument(name, "i32") for name in PICTURE)),
        ),
        k_multiple=k_multiple,
        check=_check,
        outputs=_outputs,
        reference=conv,
        budget=SUMMED,
        sample=_sample,
        numbers=integers,
        why_not=why_not,
        detour=_unfold,
        requires=_requirements(k_multiple),
    )


OPS = tuple(op for plain in products(_dense) for op in with_residual(plain))
