"""Checks of operands before an operation runs."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import struct

import torch
from torch import Tensor

from quantkit.errors import KernelError, ShapeError
from quantkit.numerics.conv_windows import ConvShape, Windows

#: What the kernels read and write beside codes, by the word for it in a variant's name.
IO_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_IO_WORDS = {dtype: word for word, dtype in IO_DTYPES.items()}

#: argument name, tensor, values of K per byte of a row
StoredWeights = tuple[tuple[str, Tensor, int], ...]


def given(operand: Tensor | None) -> Tensor:
    """Return an operand that the schema does not allow to be None."""
    assert operand is not None
    return operand


def check_quantize(op: str, x: Tensor, smooth: Tensor | None) -> None:
    """Refuse inputs of a quantize operation that no back end computes.

    Raises:
        ShapeError: x is not two-dimensional, or smooth is not one number per column.
        KernelError: a dtype, or a device that differs.
    """
    if x.ndim != 2:
        raise ShapeError(
            f"{op}: x has shape {_shape(x)}, expected (M, K); flatten the tokens first"
        )
    io_word(op, x.dtype)
    check_smoothing(op, smooth, x.shape[1], x)


def check_smoothing(op: str, smooth: Tensor | None, columns: int, x: Tensor) -> None:
    """Refuse factors that are not one float32 for each column, where ``x`` is."""
    if smooth is not None:
        expect(op, "smooth", smooth, torch.float32, (columns,))
        check_device(op, "smooth", smooth, x)


def check_scale(op: str, name: str, scale: Tensor, count: int | None) -> None:
    """Refuse scales that are not float32 with one element, or ``count`` in one dimension."""
    if scale.dtype != torch.float32:
        raise KernelError(f"{op}: {name} is {scale.dtype}, expected float32; scales are never cast")
    if scale.numel() != 1 and (count is None or scale.shape != (count,)):
        expected = "one element" if count is None else f"one element or ({count},)"
        raise ShapeError(f"{op}: {name} has shape {_shape(scale)}, expected {expected}")


def check_scalar(op: str, name: str, scale: Tensor, x: Tensor) -> None:
    """Refuse a scale that is not one float32 where ``x`` is."""
    check_scale(op, name, scale, None)
    check_device(op, name, scale, x)


def check_gemm(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weights: StoredWeights,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Refuse operands of a GEMM that do not fit together.

    Raises:
        ShapeError: shapes that do not agree.
        KernelError: a dtype that is not the operation's, or operands on several devices.
    """
    if x.ndim != 2 or x.dtype != torch.uint8:
        raise ShapeError(
            f"{op}: x is {x.dtype} of shape {_shape(x)}, expected uint8 codes of shape (M, K)"
        )
    check_scale(op, "x_scale", x_scale, x.shape[0])
    check_device(op, "x_scale", x_scale, x)
    _check_weights(op, x, x.shape[1], weights, w_scale, bias, dtype)


def check_gated(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weights: StoredWeights,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    dtype: torch.dtype,
) -> None:
    """Refuse operands of a gated GEMM that do not fit together.

    Raises:
        ShapeError: shapes that do not agree, or a row of w without one that gates it.
        KernelError: a dtype that is not the operation's, or operands on several devices.
    """
    check_gemm(op, x, x_scale, weights, w_scale, bias, dtype)
    rows = weights[0][1].shape[0]
    if rows % 2:
        raise ShapeError(f"{op}: w has {rows} rows, expected as many gates as outputs")
    check_scalar(op, "y_scale", y_scale, x)


def check_conv(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weights: StoredWeights,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    windows: Windows,
) -> ConvShape:
    """Return the shape of a convolution; refuse operands that do not fit together.

    Raises:
        ShapeError: shapes that do not agree, or no window fits into a picture.
        KernelError: a dtype that is not the operation's, or operands on several devices.
    """
    if x.ndim != 4 or x.dtype != torch.uint8:
        raise ShapeError(
            f"{op}: x is {x.dtype} of shape {_shape(x)}, expected uint8 codes of shape (B, H, W, C)"
        )
    batch, height, width, channels = x.shape
    shape = ConvShape(batch, height, width, channels, weights[0][1].shape[0], windows)
    if min(shape.outputs) < 1:
        raise ShapeError(f"{op}: no window fits into x of shape {_shape(x)}: {windows}")
    check_scalar(op, "x_scale", x_scale, x)
    _check_weights(op, x, shape.k, weights, w_scale, bias, dtype)
    return shape


def scale_words(x_scale: Tensor, w_scale: Tensor) -> tuple[str, str]:
    """Return the words for scales per tensor, token, channel and group."""
    x_word = "tensor" if x_scale.numel() == 1 else "token"
    if w_scale.ndim == 2:
        return x_word, "group"
    return x_word, "tensor" if w_scale.numel() == 1 else "channel"


def _check_weights(
    op: str,
    x: Tensor,
    k: int,
    weights: StoredWeights,
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    n = weights[0][1].shape[0]
    for name, weight, per_byte in weights:
        if k % per_byte:
            raise ShapeError(f"{op}: K {k}, expected a multiple of {per_byte}, as {name} has")
        expect(op, name, weight, torch.uint8, (n, k // per_byte))
        check_device(op, name, weight, x)
    if w_scale.ndim == 2:
        _check_group_scale(op, w_scale, n, k)
    else:
        check_scale(op, "w_scale", w_scale, n)
    io_word(op, dtype)
    if bias is not None:
        expect(op, "bias", bias, dtype, (n,))
        check_device(op, "bias", bias, x)
    check_device(op, "w_scale", w_scale, x)


def expect(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another dtype or shape."""
    if tensor.dtype != dtype:
        raise KernelError(f"{op}: {name} is {tensor.dtype}, expected {dtype}")
    if tensor.shape != shape:
        raise ShapeError(f"{op}: {name} has shape {_shape(tensor)}, expected {shape}")


def io_word(op: str, dtype: torch.dtype) -> str:
    """Return f16, bf16 or f32.

    Raises:
        KernelError: another dtype.
    """
    if dtype not in _IO_WORDS:
        raise KernelError(f"{op}: dtype {dtype}, expected float16, bfloat16 or float32")
    return _IO_WORDS[dtype]


def _check_group_scale(op: str, scale: Tensor, n: int, k: int) -> None:
    if scale.dtype != torch.float32:
        raise KernelError(
            f"{op}: w_scale is {scale.dtype}, expected float32; scales are never cast"
        )
    rows, groups = scale.shape
    if rows != n or groups == 0 or k % groups:
        raise ShapeError(
            f"{op}: w_scale has shape {_shape(scale)}, expected ({n}, groups) with groups dividing "
            f"K {k}"
        )


def eps_bits(op: str, eps: float) -> int:
    """Return the bits of what is added to a variance.

    Raises:
        KernelError: it is negative, or 1 or more.
    """
    if not 0 <= eps < 1:
        raise KernelError(f"{op}: eps {eps}, expected 0 or more and less than 1")
    return float_bits(eps)


def float_bits(number: float) -> int:
    """Return the bits of a float32: kernels take no other numbers than integers."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


def check_device(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    """Refuse an operand that is not where ``x`` is."""
    if tensor.device != x.device:
        raise KernelError(f"{op}: {name} is on {tensor.device}, x is on {x.device}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
