"""The operations in plain PyTorch: the oracle of every kernel test, and the named fallback.

Codes are uint8 here, as the kernels read them; the format goes beside them by name.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.numerics.formats import find_format
from quantkit.numerics.packing import unpack_two_of_four
from quantkit.numerics.scales import cast
from quantkit.numerics.windows import Windows


def decode(codes: Tensor, fmt: str, precision: torch.dtype = torch.float32) -> Tensor:
    """Return the values of uint8 ``codes``, exactly, in ``precision``."""
    return codes.contiguous().view(find_format(fmt).torch_dtype).to(precision)


def quantize_static(
    x: Tensor, scale: Tensor, smooth: Tensor | None, fmt: str, shift: Tensor | None = None
) -> Tensor:
    """Return the codes of ``(x - shift) * smooth / scale``, saturated; NaN stays NaN.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        scale: float32 with one element.
        smooth: (K,) float32, or None for ones.
        shift: (K,) float32, or None for zeros.

    Returns:
        (M, K) uint8.
    """
    return cast(_changed(x, smooth, shift) / scale.reshape(()), find_format(fmt)).view(torch.uint8)


def quantize_token(
    x: Tensor, smooth: Tensor | None, fmt: str, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes and one scale per row, amax(|(x - shift) * smooth|) / max; 1.0 where that is 0.

    Args:
        x: (M, K) float16, bfloat16 or float32. NaN makes its row's scale NaN, and all its codes.

    Returns:
        (M, K) uint8 and (M,) float32.
    """
    values, target = _changed(x, smooth, shift), find_format(fmt)
    amax = values.abs().amax(dim=1)
    # By a tensor: a GPU multiplies by the reciprocal of a Python number, which rounds otherwise.
    scale = amax / torch.full_like(amax, target.max)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return cast(values / scale.unsqueeze(1), target).view(torch.uint8), scale


def gate_static(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Return the codes of ``h * gelu(g) / scale``, saturated; NaN stays NaN.

    Args:
        x: (M, 2 K) float16, bfloat16 or float32: h, then g.
        scale: float32 with one element.

    Returns:
        (M, K) uint8.
    """
    h, g = x.float().chunk(2, dim=1)
    values = h * functional.gelu(g) / scale.reshape(())
    return cast(values, find_format(fmt)).view(torch.uint8)


def gemm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    dtype: torch.dtype,
    *,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(x @ w.T) * x_scale * w_scale + bias``, rounded once to ``dtype``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (N, K) uint8 codes.
        w_scale: float32, one element, (N,), or (N, K / G) with a scale per group along K.
        bias: (N,) any float dtype, or None.
        precision: of products and sums; float64 makes them exact enough to judge the others by.

    Returns:
        (M, N) in ``dtype``.
    """
    weight = decode(w, w_format, precision)
    if w_scale.ndim == 2:
        weight = weight * _per_column(w_scale, w.shape[1]).to(precision)
    y = decode(x, x_format, precision) @ weight.T
    y = y * _column(x_scale).to(precision)
    if w_scale.ndim < 2:
        y = y * w_scale.to(precision)
    return (y if bias is None else y + bias.to(precision)).to(dtype)


def geglu(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    x_format: str,
    w_format: str,
    y_format: str,
) -> Tensor:
    """Return the codes of ``h * gelu(g) / y_scale``, h and g the halves of ``gemm`` in float32.

    Args:
        w: (2 N, K) uint8 codes; the second half gates the first one.
        y_scale: float32 with one element.

    Returns:
        (M, N) uint8, saturated; NaN stays NaN.
    """
    y = gemm(x, x_scale, w, w_scale, bias, x_format, w_format, torch.float32)
    return gate_static(y, y_scale, y_format)


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
    *,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``gemm`` of the windows of pictures.

    Args:
        x: (B, H, W, C) uint8 codes; padding is the code 0.
        w: (N, kh * kw * C) uint8 codes, channels last in a row.

    Returns:
        (B, OH, OW, N) in ``dtype``.
    """
    rows = windows.unfold(x)
    formats, flat = (x_format, w_format), rows.reshape(-1, w.shape[1])
    y = gemm(flat, x_scale, w, w_scale, bias, *formats, dtype, precision=precision)
    return y.reshape(*rows.shape[:3], w.shape[0])


def _on_kept(dense: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operation of 2:4 weights: w_meta (N, K/8) stands behind the kept codes (N, K/2)."""

    def sparse(
        x: Tensor, x_scale: Tensor, w: Tensor, w_meta: Tensor, *others: Any, **options: Any
    ) -> Tensor:
        return dense(x, x_scale, unpack_two_of_four(w, w_meta), *others, **options)

    return sparse


gemm_sparse = _on_kept(gemm)
geglu_sparse = _on_kept(geglu)
conv_sparse = _on_kept(conv)


def _changed(x: Tensor, smooth: Tensor | None, shift: Tensor | None) -> Tensor:
    x = x.float() if shift is None else x.float() - shift
    return x if smooth is None else x * smooth


def _column(scale: Tensor) -> Tensor:
    return scale.reshape(-1, 1)


def _per_column(scale: Tensor, k: int) -> Tensor:
    return scale.repeat_interleave(k // scale.shape[1], dim=1)
