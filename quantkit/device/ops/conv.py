"""Convolutions on codes: the kernel that reads windows where they lie, or unfolded for a GEMM.

Which of the two is decided here (``_direct``) and nowhere else; the log names the kernel that
ran, gemm_fp8 where windows were unfolded.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantkit.device.backends import Backend, sums_are_fast
from quantkit.device.choosing import choose
from quantkit.device.gpu import calls
from quantkit.device.gpu.choice import why_no_conv
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.prepare import prepare_conv, signature
from quantkit.device.host.calls import run_conv
from quantkit.device.ops import call as execute
from quantkit.device.ops import windows as pictures
from quantkit.device.ops.checks import check_conv, io_word, scale_words
from quantkit.numerics.windows import ConvShape, Windows

_logger = logging.getLogger(__name__)


def conv(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    windows: Windows,
    x_format: str,
    w_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the convolution of pictures, as ``execute.gemm`` computes it from their windows.

    Args:
        x: (B, H, W, C) uint8 codes; padding is the code 0.
        x_scale: float32, one element.
        w: (N, kh * kw * C) uint8 codes, channels last in a row.
        w_scale: float32, one element, (N,), or (N, groups), which only the reference computes.
        bias: (N,) of ``dtype``, or None.
        windows: kernel, stride, dilation and padding.
        x_format: format of x, e4m3fn or e5m2.
        w_format: format of w.
        dtype: float16, bfloat16 or float32.

    Returns:
        (B, OH, OW, N).

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    formats = (x_format, w_format)
    return _convolve("conv_fp8", x, x_scale, (("w", w, 1),), w_scale, bias, windows, formats, dtype)


def conv_sparse(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    windows: Windows,
    x_format: str,
    w_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``conv`` of the 2:4 weight whose kept codes are ``w`` at the positions ``w_meta``.

    Args:
        x: (B, H, W, C) uint8 codes; padding is the code 0.
        x_scale: float32, one element.
        w: (N, kh * kw * C / 2) uint8 codes.
        w_meta: (N, kh * kw * C / 8) uint8, a legal nibble per group of four.
        w_scale: float32, one element, (N,), or (N, groups), which only the reference computes.
        bias: (N,) of ``dtype``, or None.
        windows: kernel, stride, dilation and padding.
        x_format: format of x, e4m3fn or e5m2.
        w_format: format of w.
        dtype: float16, bfloat16 or float32.

    Returns:
        (B, OH, OW, N).

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    weights, formats = (("w", w, 2), ("w_meta", w_meta, 8)), (x_format, w_format)
    return _convolve("conv_fp8_sparse", x, x_scale, weights, w_scale, bias, windows, formats, dtype)


def _convolve(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weights: tuple[tuple[str, Tensor, int], ...],
    w_scale: Tensor,
    bias: Tensor | None,
    windows: Windows,
    formats: tuple[str, str],
    dtype: torch.dtype,
) -> Tensor:
    """Return what ``op`` gives; weights as ``check_conv`` takes them."""
    tensors = [tensor for _, tensor, _ in weights]
    operands = (x, x_scale, *tensors, w_scale, bias)
    key = signature(op, operands, (*formats, dtype, windows, sums_are_fast()))
    if key and (call := calls.find(key)):
        return call(*operands)[0]
    shape = check_conv(op, x, x_scale, weights, w_scale, bias, dtype, windows)
    words = (*formats, *scale_words(x_scale, w_scale), io_word(op, dtype))
    if x.numel() and shape.n and (backend := _direct(op, x, words, shape)):
        if backend is Backend.GPU:
            return prepare_conv(op, words, shape, operands, key)(*operands)[0]
        return run_conv(op, words, shape, operands, dtype)
    rows = windows.unfold(x).reshape(-1, shape.k)
    multiply: Any = execute.gemm if len(weights) == 1 else execute.gemm_sparse
    y: Tensor = multiply(rows, *operands[1:], *formats, dtype)
    return y.reshape(shape.batch, *shape.outputs, shape.n)


def _direct(op: str, x: Tensor, words: tuple[str, ...], shape: ConvShape) -> Backend | None:
    """Return whose kernel reads windows where they lie; None where they are unfolded."""
    backend = choose(op, x.device, k=shape.k, group_scales=words[3] == "group").backend
    if backend is Backend.REFERENCE:
        return None
    if backend is Backend.HOST:
        reason = pictures.why_not(shape, sparse=op.endswith("sparse"))
    else:
        reason = why_no_conv(find_device(x.get_device()), op, words[-1], shape)
    if reason:
        _say_why(op, reason)
    return None if reason else backend


@lru_cache(maxsize=1024)
def _say_why(op: str, reason: str) -> None:
    _logger.info("%s unfolds its windows: %s", op, reason)
