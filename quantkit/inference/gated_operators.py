"""GEGLU as ``torch.library`` operators; the others and what holds for all: ``operators``."""

import torch
from torch import Tensor

from quantkit.device.ops import geglu as gated
from quantkit.inference.operators import define


def _geglu(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    format_name: str,
    y_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply codes, gate, and quantize: codes of h * gelu(g), h and g halves of ``gemm``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, (), (1,) or (M,).
        w: (2 N, K) uint8 codes; the second half gates the first one.
        w_scale: float32, (), (2 N,) or (2 N, K / G).
        bias: (2 N,) in ``dtype``.
        y_scale: float32, () or (1,), of the result.
        format_name: the format of both operands.
        y_format: the format of the result.
        dtype: of the bias.

    Returns:
        (M, N) uint8 codes, saturated.
    """
    if x.shape[0] == 0:
        return _gated_like(x, w)
    formats = (format_name, format_name, y_format)
    return gated.geglu(x, x_scale, w, w_scale, bias, y_scale, formats, dtype)


def _fake_geglu(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    format_name: str,
    y_format: str,
    dtype: torch.dtype,
) -> Tensor:
    del x_scale, w_scale, bias, y_scale, format_name, y_format, dtype
    return _gated_like(x, w)


def _geglu_sparse(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    format_name: str,
    y_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Do what ``geglu`` does with 2:4-sparse weights.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, (), (1,) or (M,).
        w: (2 N, K / 2) uint8 kept codes.
        w_meta: (2 N, K / 8) uint8 positions.
        w_scale: float32, () or (2 N,).
        bias: (2 N,) in ``dtype``.
        y_scale: float32, () or (1,), of the result.
        format_name: the format of both operands.
        y_format: the format of the result.
        dtype: of the bias.

    Returns:
        (M, N) uint8 codes, saturated.
    """
    if x.shape[0] == 0:
        return _gated_like(x, w)
    formats = (format_name, format_name, y_format)
    return gated.geglu_sparse(x, x_scale, w, w_meta, w_scale, bias, y_scale, formats, dtype)


def _fake_geglu_sparse(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    format_name: str,
    y_format: str,
    dtype: torch.dtype,
) -> Tensor:
    del x_scale, w_meta, w_scale, bias, y_scale, format_name, y_format, dtype
    return _gated_like(x, w)


def _gated_like(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0] // 2), dtype=torch.uint8)


_GEGLU = (
    "Tensor w_scale, Tensor? bias, Tensor y_scale, str format_name, str y_format, "
    "ScalarType dtype) -> Tensor"
)

geglu = define(f"geglu(Tensor x, Tensor x_scale, Tensor w, {_GEGLU}", _geglu, _fake_geglu)
geglu_sparse = define(
    f"geglu_sparse(Tensor x, Tensor x_scale, Tensor w, Tensor w_meta, {_GEGLU}",
    _geglu_sparse,
    _fake_geglu_sparse,
)
