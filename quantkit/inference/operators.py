"""Operations on rows as ``torch.library`` operators: ``torch.compile`` sees through them.

Each has a fake implementation (shapes and dtypes only). What computes is ``device.execute``, which
chooses kernel or reference at run time, outside of any compiled graph. Codes are uint8 here; the
format's name says what they mean. Empty inputs never reach a kernel.

They are defined through ``torch.library.define``, whose dispatch costs a quarter of what
``torch.library.custom_op`` adds to every call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops import call as execute


def define(
    schema: str, run: Callable[..., object], fake: Callable[..., object]
) -> Callable[..., Any]:
    """Return a new operator without a gradient: packed layers are not trained."""
    name, _, signature = schema.partition("(")
    qualified = f"quantkit::{name}"
    torch.library.define(qualified, f"({signature}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", run)
    torch.library.register_fake(qualified, fake)
    operator: Callable[..., Any] = getattr(torch.ops.quantkit, name).default
    return operator


def _quantize_static(
    x: Tensor, scale: Tensor, smooth: Tensor | None, format_name: str, shift: Tensor | None = None
) -> Tensor:
    """Quantize rows with one given scale.

    Args:
        x: (M, K), float16, bfloat16 or float32, contiguous.
        scale: float32, (1,) or ().
        smooth: float32 (K,); multiplies the columns first.
        format_name: "e4m3fn" or "e5m2".
        shift: float32 (K,); is taken from the columns before that.

    Returns:
        (M, K) uint8 codes of (x - shift) * smooth / scale, saturated; NaN stays NaN.
    """
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=torch.uint8)
    return execute.quantize_static(x, scale, smooth, format_name, shift)


def _fake_quantize_static(
    x: Tensor, scale: Tensor, smooth: Tensor | None, format_name: str, shift: Tensor | None = None
) -> Tensor:
    del scale, smooth, format_name, shift
    return x.new_empty(x.shape, dtype=torch.uint8)


def _quantize_token(
    x: Tensor, smooth: Tensor | None, format_name: str, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize rows, each with the scale of its own amax.

    Args:
        x: (M, K), float16, bfloat16 or float32, contiguous.
        smooth: float32 (K,); multiplies the columns first.
        format_name: "e4m3fn" or "e5m2".
        shift: float32 (K,); is taken from the columns before that.

    Returns:
        (M, K) uint8 codes, and (M,) float32 scales; 1.0 for an all-zero row.
    """
    if x.numel() == 0:
        return _token_like(x)
    return execute.quantize_token(x, smooth, format_name, shift)


def _fake_quantize_token(
    x: Tensor, smooth: Tensor | None, format_name: str, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    del smooth, format_name, shift
    return _token_like(x)


def _gemm(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply codes: x @ w.T * x_scale * w_scale + bias, accumulated in float32.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, (), (1,) or (M,).
        w: (N, K) uint8 codes.
        w_scale: float32, (), (N,) or (N, K / G).
        bias: (N,) in ``dtype``.
        format_name: the format of both operands.
        dtype: of the result.

    Returns:
        (M, N) in ``dtype``, rounded once.
    """
    if x.shape[0] == 0:
        return x.new_empty((0, w.shape[0]), dtype=dtype)
    return execute.gemm(x, x_scale, w, w_scale, bias, format_name, format_name, dtype)


def _fake_gemm(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    del x_scale, w_scale, bias, format_name
    return x.new_empty((x.shape[0], w.shape[0]), dtype=dtype)


def _gemm_sparse(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply codes by 2:4-sparse weights: as ``gemm``, with the kept half of ``w``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, (), (1,) or (M,).
        w: (N, K / 2) uint8 kept codes.
        w_meta: (N, K / 8) uint8 positions.
        w_scale: float32, () or (N,).
        bias: (N,) in ``dtype``.
        format_name: the format of both operands.
        dtype: of the result.

    Returns:
        (M, N) in ``dtype``, rounded once.
    """
    if x.shape[0] == 0:
        return x.new_empty((0, w.shape[0]), dtype=dtype)
    return execute.gemm_sparse(
        x, x_scale, w, w_meta, w_scale, bias, format_name, format_name, dtype
    )


def _fake_gemm_sparse(  # noqa: PLR0917  the order is the operator's schema
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_meta: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    format_name: str,
    dtype: torch.dtype,
) -> Tensor:
    del x_scale, w_meta, w_scale, bias, format_name
    return x.new_empty((x.shape[0], w.shape[0]), dtype=dtype)


def _token_like(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, x.new_empty((x.shape[0],), dtype=torch.float32)


_FORMAT = "str format_name"
_SHIFT = "Tensor? shift=None"
_GEMM = f"Tensor w_scale, Tensor? bias, {_FORMAT}, ScalarType dtype) -> Tensor"

quantize_static = define(
    f"quantize_static(Tensor x, Tensor scale, Tensor? smooth, {_FORMAT}, {_SHIFT}) -> Tensor",
    _quantize_static,
    _fake_quantize_static,
)
quantize_token = define(
    f"quantize_token(Tensor x, Tensor? smooth, {_FORMAT}, {_SHIFT}) -> (Tensor, Tensor)",
    _quantize_token,
    _fake_quantize_token,
)
gemm = define(f"gemm(Tensor x, Tensor x_scale, Tensor w, {_GEMM}", _gemm, _fake_gemm)
gemm_sparse = define(
    f"gemm_sparse(Tensor x, Tensor x_scale, Tensor w, Tensor w_meta, {_GEMM}",
    _gemm_sparse,
    _fake_gemm_sparse,
)
