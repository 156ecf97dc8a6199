"""The operations on tensors: check, choose the back end, run, log.

On a GPU, a call whose operands have the shapes and dtypes of an earlier one goes straight to what
was prepared for that (gpu.calls).

Codes are uint8 tensors with the format's name beside them. Operands that are not contiguous, or do
not start on 16 bytes, are copied first: kernels read rows of plain memory.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantkit.device import log
from quantkit.device.backends import Backend, sums_are_fast
from quantkit.device.choosing import choose
from quantkit.device.gpu import calls
from quantkit.device.gpu.prepare import prepare_gemm, prepare_quantize, signature
from quantkit.device.host.calls import run_gemm, run_quantize
from quantkit.device.ops import reference
from quantkit.device.ops.checks import (
    check_device,
    check_gemm,
    check_quantize,
    check_scale,
    io_word,
    scale_words,
)
from quantkit.device.ops.table import find_op

_logger = logging.getLogger(__name__)


def quantize_static(
    x: Tensor, scale: Tensor, smooth: Tensor | None, fmt: str, shift: Tensor | None = None
) -> Tensor:
    """Return the codes of ``(x - shift) * smooth / scale``, saturated; NaN stays NaN.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        scale: float32, one element.
        smooth: (K,) float32, or None.
        fmt: e4m3fn or e5m2.
        shift: (K,) float32, or None.

    Returns:
        (M, K) uint8.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    op, operands = "quantize_fp8_static", (x, smooth, shift, scale)
    key = signature(op, operands, (fmt,))
    if key and (call := calls.find(key)):
        return call(*operands)[0]
    check_quantize(op, x, smooth, shift)
    check_scale(op, "scale", scale, None)
    check_device(op, "scale", scale, x)
    words = _quantize_words(op, x, smooth, shift, fmt)
    backend = backend_of(op, x, words)
    if backend is Backend.REFERENCE:
        return reference.quantize_static(x, scale, smooth, fmt, shift)
    if backend is Backend.GPU and x.numel():
        return prepare_quantize(op, words, operands, key)(*operands)[0]
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    run_quantize(op, words, (x, smooth, shift), scale, q)
    return q


def quantize_token(
    x: Tensor, smooth: Tensor | None, fmt: str, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes and a scale per row: amax(|(x - shift) * smooth|) / max, 1.0 for a row of zeros.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        smooth: (K,) float32, or None.
        fmt: e4m3fn or e5m2.
        shift: (K,) float32, or None.

    Returns:
        (M, K) uint8 and (M,) float32.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    op, operands = "quantize_fp8_token", (x, smooth, shift)
    key = signature(op, operands, (fmt,))
    if key and (call := calls.find(key)):
        scale, q = call(*operands)
        return q, scale
    check_quantize(op, x, smooth, shift)
    words = _quantize_words(op, x, smooth, shift, fmt)
    backend = backend_of(op, x, words)
    if backend is Backend.REFERENCE:
        return reference.quantize_token(x, smooth, fmt, shift)
    if backend is Backend.GPU and x.numel():
        scale, q = prepare_quantize(op, words, operands, key)(*operands)
        return q, scale
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    run_quantize(op, words, (x, smooth, shift), scale, q)
    return q, scale


def gemm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``(x @ w.T) * x_scale * w_scale + bias`` in ``dtype``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (N, K) uint8 codes.
        w_scale: float32, one element, (N,), or (N, K / G), which only the reference computes.
        bias: (N,) of ``dtype``, or None.
        x_format: format of x, e4m3fn or e5m2.
        w_format: format of w.
        dtype: float16, bfloat16 or float32.

    Returns:
        (M, N).

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    op, operands = "gemm_fp8", (x, x_scale, w, w_scale, bias)
    key = signature(op, operands, (x_format, w_format, dtype, sums_are_fast()))
    if key and (call := calls.find(key)):
        return call(*operands)[0]
    weights, formats = (("w", w, 1),), (x_format, w_format)
    return _multiply(op, x, x_scale, weights, w_scale, bias, formats, dtype, key)


def gemm_sparse(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``gemm`` of the 2:4 weight whose kept codes are ``w`` at the positions ``w_meta``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (N, K / 2) uint8 codes.
        w_meta: (N, K / 8) uint8, a legal nibble per group of four.
        w_scale: float32, one element, (N,), or (N, K / G), which only the reference computes.
        bias: (N,) of ``dtype``, or None.
        x_format: format of x, e4m3fn or e5m2.
        w_format: format of w.
        dtype: float16, bfloat16 or float32.

    Returns:
        (M, N).

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    op, operands = "gemm_fp8_sparse", (x, x_scale, w, w_meta, w_scale, bias)
    key = signature(op, operands, (x_format, w_format, dtype, sums_are_fast()))
    if key and (call := calls.find(key)):
        return call(*operands)[0]
    weights, formats = (("w", w, 2), ("w_meta", w_meta, 8)), (x_format, w_format)
    return _multiply(op, x, x_scale, weights, w_scale, bias, formats, dtype, key)


def _multiply(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    weights: tuple[tuple[str, Tensor, int], ...],
    w_scale: Tensor,
    bias: Tensor | None,
    formats: tuple[str, str],
    dtype: torch.dtype,
    key: calls.Signature,
) -> Tensor:
    """Return what ``op`` gives where no call is prepared; weights as ``check_gemm`` takes them."""
    check_gemm(op, x, x_scale, weights, w_scale, bias, dtype)
    tensors = tuple(tensor for _, tensor, _ in weights)
    operands = (x, x_scale, *tensors, w_scale, bias)
    words = (*formats, *scale_words(x_scale, w_scale), io_word(op, dtype))
    backend = backend_of(op, x, words, group_scales=w_scale.ndim == 2)
    if backend is Backend.REFERENCE:
        compute: Any = find_op(op).reference
        y: Tensor = compute(*operands, *formats, dtype)
        return y
    if backend is Backend.GPU and x.shape[0] and tensors[0].shape[0]:
        return prepare_gemm(op, words, operands, key)(*operands)[0]
    return run_gemm(op, words, operands, dtype)


def backend_of(
    op: str, x: Tensor, words: tuple[str, ...], *, group_scales: bool = False
) -> Backend:
    """Return where an operation on ``x`` runs; say why where it is the reference.

    Args:
        op: a name in OPS.
        x: codes or values, (M, K).
        words: of the variant, for the log.
        group_scales: the weight has scales per group along K.

    Raises:
        KernelError: a kernel was forced with ``use`` and cannot run this.
    """
    choice = choose(op, x.device, k=x.shape[1], group_scales=group_scales)
    if choice.backend is Backend.REFERENCE:
        _say_why(op, choice.reason)
        log.note(op, "_".join(word for word in words if word), Backend.REFERENCE)
    return choice.backend


@lru_cache(maxsize=1024)
def _say_why(op: str, reason: str) -> None:
    _logger.info("%s runs on the reference: %s", op, reason)


def _quantize_words(
    op: str, x: Tensor, smooth: Tensor | None, shift: Tensor | None, fmt: str
) -> tuple[str, ...]:
    changes = (word for word, t in (("shift", shift), ("smooth", smooth)) if t is not None)
    return io_word(op, x.dtype), fmt, "_".join(changes)
