"""GEGLU on codes: one kernel that gates and quantizes a product while it has it, or two.

Which of the two is decided here (``has_kernel``) and nowhere else; the log names the kernels that
ran, gemm_fp8 and gate_fp8_static where they were two. Two round the product to ``dtype``: codes
differ by a place where that, or the order of a sum, moves a value across a boundary.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from typing import Any

import torch
from torch import Tensor

from quantkit.device import execute
from quantkit.device.backends import Backend, sums_are_fast
from quantkit.device.choosing import choose
from quantkit.device.gpu import calls
from quantkit.device.gpu.choice import is_hopper
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.prepare import prepare_geglu, signature
from quantkit.device.operands import check_gated, io_word, scale_words

#: of x, w and y
Formats = tuple[str, str, str]


def geglu(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    formats: Formats,
    dtype: torch.dtype,
) -> Tensor:
    """Return codes of ``h * gelu(g) / y_scale``, h and g the halves of ``execute.gemm``'s result.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (2 N, K) uint8 codes; the second half gates the first one.
        w_scale: float32, one element, (2 N,), or (2 N, K / G), which only the reference computes.
        bias: (2 N,) of ``dtype``, or None.
        y_scale: float32, one element.
        formats: of x, w and the result.
        dtype: float16, bfloat16 or float32, of the product where two kernels run.

    Returns:
        (M, N) uint8, saturated; NaN stays NaN.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    return _gate("geglu_fp8", x, x_scale, (("w", w, 1),), w_scale, bias, y_scale, formats, dtype)


def geglu_sparse(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    formats: Formats,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``geglu`` of the 2:4 weight whose kept codes are ``w`` at the positions ``w_meta``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (2 N, K / 2) uint8 codes.
        w_meta: (2 N, K / 8) uint8, a legal nibble per group of four.
        w_scale: float32, one element, (2 N,), or (2 N, K / G), which only the reference computes.
        bias: (2 N,) of ``dtype``, or None.
        y_scale: float32, one element.
        formats: of x, w and the result.
        dtype: float16, bfloat16 or float32, of the product where two kernels run.

    Returns:
        (M, N) uint8, saturated; NaN stays NaN.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    weights = (("w", w, 2), ("w_meta", w_meta, 8))
    return _gate("geglu_fp8_sparse", x, x_scale, weights, w_scale, bias, y_scale, formats, dtype)


def has_kernel(device: torch.device, k: int, n: int, *, sparse: bool) -> bool:
    """Return whether one kernel computes GEGLU of (M, K) codes to (M, N) ones on this device."""
    op = "gemm_fp8_sparse" if sparse else "gemm_fp8"
    if device.type != "cuda" or choose(op, device, k=k).backend is not Backend.GPU:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return n > 0 and n % 16 == 0 and is_hopper(find_device(index))


def has_gate(device: torch.device) -> bool:
    """Return whether a kernel gates and quantizes on this device, a GPU."""
    return device.type == "cuda" and choose("gate_fp8_static", device, k=1).backend is Backend.GPU


def _gate(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weights: tuple[tuple[str, Tensor, int], ...],
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    formats: Formats,
    dtype: torch.dtype,
) -> Tensor:
    """Return what ``op`` gives; weights as ``check_gated`` takes them."""
    tensors = tuple(tensor for _, tensor, _ in weights)
    operands = (x, x_scale, *tensors, w_scale, bias, y_scale)
    key = signature(op, operands, (formats, dtype, sums_are_fast()))
    if key and (call := calls.find(key)):
        return call(*operands)[0]
    check_gated(op, x, x_scale, weights, w_scale, bias, y_scale, dtype)
    n, sparse = tensors[0].shape[0] // 2, len(tensors) > 1
    fused = x.shape[0] > 0 and w_scale.ndim < 2
    if fused and has_kernel(x.device, x.shape[1], n, sparse=sparse):
        words = (*formats[:2], *scale_words(x_scale, w_scale), io_word(op, dtype), formats[2])
        return prepare_geglu(op, words, operands, key)(*operands)[0]
    multiply: Any = execute.gemm_sparse if sparse else execute.gemm
    return execute.gate_static(multiply(*operands[:-1], *formats[:2], dtype), y_scale, formats[2])
