"""GEGLU on codes: one kernel gates and quantizes the product while it has it."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from typing import Any

import torch
from torch import Tensor

from quantkit.device.backends import Backend, sums_are_fast
from quantkit.device.choosing import choose
from quantkit.device.gpu import calls
from quantkit.device.gpu.prepare import prepare_geglu, signature
from quantkit.device.host.calls import run_geglu
from quantkit.device.ops.call import backend_of
from quantkit.device.ops.checks import check_gated, io_word, scale_words
from quantkit.device.ops.table import find_op

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
    """Return codes of ``h * gelu(g) / y_scale``, h and g the halves of a product.

    That is ``execute.gemm``'s in float32: nothing is rounded before it is gated.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (2 N, K) uint8 codes; the second half gates the first one.
        w_scale: float32, one element, (2 N,), or (2 N, K / G), which only the reference computes.
        bias: (2 N,) of ``dtype``, or None.
        y_scale: float32, one element.
        formats: of x, w and the result.
        dtype: float16, bfloat16 or float32, of the bias.

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
        dtype: float16, bfloat16 or float32, of the bias.

    Returns:
        (M, N) uint8, saturated; NaN stays NaN.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    weights = (("w", w, 2), ("w_meta", w_meta, 8))
    return _gate("geglu_fp8_sparse", x, x_scale, weights, w_scale, bias, y_scale, formats, dtype)


def has_kernel(device: torch.device, k: int, *, sparse: bool) -> bool:
    """Return whether a kernel of this GPU computes GEGLU of (M, K) codes."""
    op = "geglu_fp8_sparse" if sparse else "geglu_fp8"
    return device.type == "cuda" and choose(op, device, k=k).backend is Backend.GPU


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
    words = (*formats[:2], *scale_words(x_scale, w_scale), io_word(op, dtype), formats[2])
    backend = backend_of(op, x, words, group_scales=w_scale.ndim == 2)
    if backend is Backend.REFERENCE:
        compute: Any = find_op(op).reference
        y: Tensor = compute(*operands, *formats)
        return y
    if backend is Backend.GPU and x.shape[0] and tensors[0].shape[0]:
        return prepare_geglu(op, words, operands, key)(*operands)[0]
    return run_geglu(op, words, operands)
