"""The operations on tensors: check, choose the back end, run, log.

Codes are uint8 tensors with the format's name beside them. Operands that are not contiguous, or do
not start on 16 bytes, are copied first: kernels read rows of plain memory.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import logging
from functools import lru_cache

import torch
from torch import Tensor

from quantkit.device import backends, host, log, reference
from quantkit.device.backends import Backend
from quantkit.device.geometry import ceil_div, tiles
from quantkit.device.operands import check_gemm, check_quantize, check_scale, io_word
from quantkit.device.ops import Variant, find_op

_logger = logging.getLogger(__name__)

#: GFLOP/s of one core per tile of the menu, whole tiles of a dense GEMM with K = 512 (Zen 5, g++
#: 12, docs/kernels.md); only the ratios matter.
_TILE_SPEED = (75.0, 55.0, 26.0)


def quantize_static(x: Tensor, scale: Tensor, smooth: Tensor | None, fmt: str) -> Tensor:
    """Return the codes of ``x * smooth / scale``, saturated; NaN stays NaN.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        scale: float32, one element.
        smooth: (K,) float32, or None.
        fmt: e4m3fn or e5m2.

    Returns:
        (M, K) uint8.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    op = "quantize_fp8_static"
    check_quantize(op, x, smooth)
    check_scale(op, "scale", scale, None)
    words = _quantize_words(op, x, smooth, fmt)
    if _on_reference(op, x, words):
        return reference.quantize_static(x, scale, smooth, fmt)
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _run_quantize(op, words, x, smooth, _plain(scale), q)
    return q


def quantize_token(x: Tensor, smooth: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    """Return codes and one scale per row: amax(|x * smooth|) / max, 1.0 for an all-zero row.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        smooth: (K,) float32, or None.
        fmt: e4m3fn or e5m2.

    Returns:
        (M, K) uint8 and (M,) float32.

    Raises:
        ShapeError, KernelError: operands that do not fit together.
    """
    op = "quantize_fp8_token"
    check_quantize(op, x, smooth)
    words = _quantize_words(op, x, smooth, fmt)
    if _on_reference(op, x, words):
        return reference.quantize_token(x, smooth, fmt)
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _run_quantize(op, words, x, smooth, scale, q)
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
    op = "gemm_fp8"
    check_gemm(op, x, x_scale, (("w", w, 1),), w_scale, bias, dtype)
    words = (x_format, w_format, *_scale_words(x_scale, w_scale), io_word(op, dtype))
    if _on_reference(op, x, words, group_scales=w_scale.ndim == 2):
        return reference.gemm(x, x_scale, w, w_scale, bias, x_format, w_format, dtype)
    return _run_gemm(op, words, x, x_scale, (w,), w_scale, bias, dtype)


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
    op = "gemm_fp8_sparse"
    weights = (("w", w, 2), ("w_meta", w_meta, 8))
    check_gemm(op, x, x_scale, weights, w_scale, bias, dtype)
    words = (x_format, w_format, *_scale_words(x_scale, w_scale), io_word(op, dtype))
    if _on_reference(op, x, words, group_scales=w_scale.ndim == 2):
        return reference.gemm_sparse(
            x, x_scale, w, w_meta, w_scale, bias, x_format, w_format, dtype
        )
    return _run_gemm(op, words, x, x_scale, (w, w_meta), w_scale, bias, dtype)


@lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, threads: int) -> str:
    """Return the tile that finishes M tokens and N outputs first on ``threads`` cores.

    Blocks at the edge cost as much as whole ones, and a core that has none waits: both follow from
    the number of rounds. On ties the larger tile wins.
    """

    def seconds(index: int) -> float:
        tile = tiles()[index]
        blocks = ceil_div(m, tile.m) * ceil_div(n, tile.n)
        return ceil_div(blocks, threads) * tile.m * tile.n / _TILE_SPEED[index]

    return f"t{min(range(len(_TILE_SPEED)), key=seconds)}"


def _run_quantize(
    op: str, words: tuple[str, ...], x: Tensor, smooth: Tensor | None, scale: Tensor, q: Tensor
) -> None:
    if q.numel() == 0:
        return
    m, k = x.shape
    kernel = _kernel(op, words)
    # Names keep the copies alive until the kernel has returned.
    x, smooth = _plain(x), None if smooth is None else _plain(smooth)
    values = (x.data_ptr(), _address(smooth), scale.data_ptr(), q.data_ptr(), m, k)
    kernel.launch(values, m, 0, k, torch.get_num_threads())
    log.note(op, kernel.variant.name, Backend.HOST)


def _run_gemm(
    op: str,
    words: tuple[str, ...],
    x: Tensor,
    x_scale: Tensor,
    weights: tuple[Tensor, ...],
    w_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    (m, k), n = x.shape, weights[0].shape[0]
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    threads = torch.get_num_threads()
    kernel = _kernel(op, (*words, choose_tile(m, n, threads)))
    x, x_scale, w_scale = _plain(x), _plain(x_scale), _plain(w_scale)
    weights, bias = tuple(_plain(w) for w in weights), None if bias is None else _plain(bias)
    values = (
        x.data_ptr(),
        x_scale.data_ptr(),
        *(w.data_ptr() for w in weights),
        w_scale.data_ptr(),
        _address(bias),
        y.data_ptr(),
        m,
        n,
        k,
    )
    kernel.launch(values, m, n, k, threads)
    log.note(op, kernel.variant.name, Backend.HOST)
    return y


def _on_reference(
    op: str, x: Tensor, words: tuple[str, ...], *, group_scales: bool = False
) -> bool:
    choice = backends.choose(op, x.device, k=x.shape[1], group_scales=group_scales)
    if choice.backend is not Backend.REFERENCE:
        return False
    _say_why(op, choice.reason)
    log.note(op, "_".join(word for word in words if word), Backend.REFERENCE)
    return True


@lru_cache(maxsize=1024)
def _say_why(op: str, reason: str) -> None:
    _logger.info("%s runs on the reference: %s", op, reason)


@lru_cache(maxsize=1024)
def _kernel(op: str, words: tuple[str, ...]) -> host.HostKernel:
    return host.load(Variant(find_op(op), words))


def _quantize_words(op: str, x: Tensor, smooth: Tensor | None, fmt: str) -> tuple[str, ...]:
    return io_word(op, x.dtype), fmt, "" if smooth is None else "smooth"


def _scale_words(x_scale: Tensor, w_scale: Tensor) -> tuple[str, str]:
    x_word = "tensor" if x_scale.numel() == 1 else "token"
    if w_scale.ndim == 2:
        return x_word, "group"
    return x_word, "tensor" if w_scale.numel() == 1 else "channel"


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    # A view can start anywhere, and weights mapped from a file often start on 8 bytes.
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
