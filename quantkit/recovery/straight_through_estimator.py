"""Straight-through estimators: autograd functions that quantize in the forward pass only.

Nothing waits for the device, so CUDA graphs can hold them. The input's codes are multiplied as they
are, which is exact in bfloat16 and float32, and scaled afterwards.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.numerics.conv_windows import Windows
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.numerics.scales import cast, scale_of_amax

#: Elements of windows that are unfolded at a time: 7 bytes each, so about 0.9 GB.
WINDOW_ELEMENTS = 1 << 27


@dataclass(frozen=True, eq=False)
class InputQuant:
    """The quantization of an input, and the steps of a convolution's window."""

    fmt: NumberFormat
    #: None: one per row or window, of its own amax
    scale: Tensor | None
    #: of the result
    dtype: torch.dtype
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()


class QuantizedLinear(torch.autograd.Function):
    """Quantized rows (M, K) times a quantized weight (N, K)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: InputQuant
    ) -> Tensor:
        """Return (M, N)."""
        narrow = weight.to(_compute_dtype(how.dtype))
        # As the gradient multiplies it: a smoothed input is float32, and would be twice as large.
        ctx.save_for_backward(x.to(narrow.dtype), narrow)
        ctx.input_dtype = x.dtype
        scale = how.scale
        if scale is None:
            scale = scale_of_amax(x.abs().amax(dim=-1, keepdim=True), how.fmt)
        codes = _codes(x.float() / scale, how.fmt, narrow.dtype)
        return _scaled(codes @ narrow.T, scale, bias, how.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the unquantized rows times the quantized weight."""
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]
        return (
            (grad @ weight).to(ctx.input_dtype) if by_x else None,
            (grad.T @ x).float() if by_weight else None,
            grad.sum(dim=0, dtype=torch.float32) if by_bias else None,
            None,
        )


class QuantizedConv2d(torch.autograd.Function):
    """Quantized windows of padded (B, C, H, W) times a quantized weight (N, C, kh, kw)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: InputQuant
    ) -> Tensor:
        """Return (B, N, OH, OW)."""
        narrow = weight.to(_compute_dtype(how.dtype))
        ctx.save_for_backward(x.to(narrow.dtype), narrow)
        ctx.input_dtype = x.dtype
        ctx.how = how
        dtype = how.dtype
        if how.scale is not None:
            codes = _codes(x.float() / how.scale, how.fmt, narrow.dtype)
            y = functional.conv2d(codes, narrow, None, how.stride, 0, how.dilation)
            return _scaled(y.movedim(1, -1), how.scale, bias, dtype).movedim(-1, 1)
        kernel = narrow.shape[2:]
        # Padded by the caller.
        seen = Windows.of((*kernel, *how.stride, *how.dilation, 0, 0, 0, 0))
        windows = seen.unfold(x.permute(0, 2, 3, 1))
        scales = scale_of_amax(_window_amax(x, kernel, how), how.fmt)
        y = _multiply_windows(windows, scales, to_rows(narrow), how.fmt)
        return _scaled(y, scales.unsqueeze(-1), bias, dtype).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the unquantized input under the quantized weight."""
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]
        dx, dw, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, ctx.how.stride, (0, 0), ctx.how.dilation,
            False, (0, 0), 1, (by_x, by_weight, False),
        )  # fmt: skip
        return (
            dx.to(ctx.input_dtype) if by_x else None,
            dw.float() if by_weight else None,
            grad.sum(dim=(0, 2, 3), dtype=torch.float32) if by_bias else None,
            None,
        )


def output_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype, or the input's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products whose result has ``dtype``."""
    # Unscaled sums of codes, up to 448 each, leave the range of float16.
    return torch.float32 if dtype is torch.float16 else dtype


def _codes(values: Tensor, fmt: NumberFormat, dtype: torch.dtype) -> Tensor:
    """Return the nearest codes as numbers of a dtype that holds them; values are overwritten."""
    if not fmt.is_integer:
        return cast(values, fmt).to(dtype)
    # Without the codes' own dtype and a place for NaN, a quarter of the time; NaN stays NaN.
    return values.round_().clamp_(fmt.min, fmt.max).to(dtype)


def _multiply_windows(windows: Tensor, scales: Tensor, rows: Tensor, fmt: NumberFormat) -> Tensor:
    """Return (B, OH, OW, N), yet unscaled, of windows (B, OH, OW, kh, kw, C) and rows (N, K)."""
    samples = max(1, WINDOW_ELEMENTS // windows[0].numel())
    y = rows.new_empty(*windows.shape[:3], len(rows))
    for start in range(0, len(windows), samples):
        view, scale, out = (t[start : start + samples] for t in (windows, scales, y))
        # Into plain memory: the view's strides overlap, and results would follow their order.
        values = torch.empty(view.shape, dtype=torch.float32, device=view.device)
        torch.div(view, scale.reshape(*scale.shape, 1, 1, 1), out=values)
        codes = _codes(values, fmt, rows.dtype).reshape(-1, rows.shape[1])
        out.copy_((codes @ rows.T).view_as(out))
    return y


def _window_amax(x: Tensor, kernel: torch.Size, how: InputQuant) -> Tensor:
    """Return (B, OH, OW): the largest |x| of each window."""
    loudest = x.abs().amax(dim=1, keepdim=True)
    pooled = functional.max_pool2d(loudest, tuple(kernel), how.stride, 0, how.dilation)
    return pooled.squeeze(1)


def _scaled(y: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``y * scale + bias`` over the last axis, rounded once to ``dtype``."""
    wide = y.float() * scale
    return (wide if bias is None else wide + bias.float()).to(dtype)
