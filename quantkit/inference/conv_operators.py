"""Convolutions as ``torch.library`` operators; the others and what holds for all: ``operators``."""

import torch
from torch import Tensor

from quantkit.device.ops import conv as convolve
from quantkit.inference.operators import define
from quantkit.numerics.windows import Windows


def _conv(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    windows: list[int],
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    """Convolve codes with channels last: as ``gemm``, of the windows of pictures.

    Args:
        x: (B, H, W, C) uint8 codes; around a picture is the code 0.
        x_scale: float32, () or (1,).
        w: (N, kh * kw * C) uint8 codes.
        w_scale: float32, (), (N,) or (N, kh * kw * C / G).
        bias: (N,) in ``dtype``.
        windows: kernel, stride and dilation along H and W, and padding left, right, top, bottom.
        format_name: the format of both operands.
        dtype: of the result.

    Returns:
        (B, OH, OW, N) in ``dtype``, rounded once.
    """
    if x.shape[0] == 0:
        return _conv_like(x, w, windows, dtype)
    how = Windows.of(tuple(windows))
    return convolve.conv(x, x_scale, w, w_scale, bias, how, format_name, format_name, dtype)


def _fake_conv(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    windows: list[int],
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    del x_scale, w_scale, bias, format_name
    return _conv_like(x, w, windows, dtype)


def _conv_sparse(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    windows: list[int],
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    """Convolve codes with 2:4-sparse weights: as ``conv``, with the kept half of ``w``.

    Args:
        x: (B, H, W, C) uint8 codes; around a picture is the code 0.
        x_scale: float32, () or (1,).
        w: (N, kh * kw * C / 2) uint8 kept codes.
        w_meta: (N, kh * kw * C / 8) uint8 positions.
        w_scale: float32, () or (N,).
        bias: (N,) in ``dtype``.
        windows: kernel, stride and dilation along H and W, and padding left, right, top, bottom.
        format_name: the format of both operands.
        dtype: of the result.

    Returns:
        (B, OH, OW, N) in ``dtype``, rounded once.
    """
    if x.shape[0] == 0:
        return _conv_like(x, w, windows, dtype)
    how = Windows.of(tuple(windows))
    return convolve.conv_sparse(
        x, x_scale, w, w_meta, w_scale, bias, how, format_name, format_name, dtype
    )


def _fake_conv_sparse(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    windows: list[int],
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    del x_scale, w_meta, w_scale, bias, format_name
    return _conv_like(x, w, windows, dtype)


def _conv_like(x: Tensor, w: Tensor, windows: list[int], dtype: torch.dtype) -> Tensor:
    tall, wide = Windows.of(tuple(windows)).outputs(x.shape[1], x.shape[2])
    return x.new_empty((x.shape[0], tall, wide, w.shape[0]), dtype=dtype)


_CONV = "Tensor w_scale, Tensor? bias, int[] windows, str format_name, ScalarType dtype) -> Tensor"

conv = define(f"conv(Tensor x, Tensor x_scale, Tensor w, {_CONV}", _conv, _fake_conv)
conv_sparse = define(
    f"conv_sparse(Tensor x, Tensor x_scale, Tensor w, Tensor w_meta, {_CONV}",
    _conv_sparse,
    _fake_conv_sparse,
)
