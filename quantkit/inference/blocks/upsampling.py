"""Upsamplers of packed models that quantize pixels before repeating them.

Each pixel of a nearest upsampling is one of the small picture, and so are its codes: a quarter is
read to quantize, and bytes are repeated instead of 16 bit. Outside of torch.compile, which fuses
these on its own.
"""

from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from torch import Tensor
from torch.nn import functional

from quantkit.device.ops.checks import IO_DTYPES
from quantkit.inference.blocks.picture_norms import pixels, reads_codes
from quantkit.inference.layers.modules import PackedConv2d, is_watched

#: Codes that are moved as one float64, and as one complex128, which torch does not interpolate.
_RUN, _WIDE_RUN = 8, 16


class CodedUpsample2D(Upsample2D):  # type: ignore[misc]  # diffusers' own class is untyped
    """An Upsample2D whose convolution is packed; parameters and submodules are the same."""

    def forward(
        self, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the output of Upsample2D, in the layout of its input."""
        x = hidden_states
        if args or kwargs or not _takes_codes(self, x):
            y: Tensor = super().forward(x, output_size, *args, **kwargs)
            return y
        codes = self.conv.codes_of_pixels(pixels(x))
        y = self.conv.convolve_codes(_repeated(codes, output_size), x.dtype).permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y


def fits(upsampler: Any) -> bool:
    """Tell whether a convolution of codes is the only reader of the upsampled picture."""
    plain = upsampler.norm is None and upsampler.interpolate and not upsampler.use_conv_transpose
    conv = getattr(upsampler, "conv", None)
    if not plain or type(conv) is not PackedConv2d:
        return False
    return reads_codes(conv) and conv.dense_shape[1] % _RUN == 0


def _takes_codes(upsampler: CodedUpsample2D, x: Tensor) -> bool:
    # Adapters take a layer's place.
    if torch.compiler.is_compiling() or not fits(upsampler) or is_watched(upsampler.conv):
        return False
    return x.dtype in IO_DTYPES.values() and x.shape[1] == upsampler.channels and x.numel() > 0


def _repeated(codes: Tensor, size: Any) -> Tensor:
    """Return (B, H, W, C) codes of the picture at ``size``, or at twice its own."""
    if size is None and codes.shape[3] % _WIDE_RUN == 0:
        return _doubled(codes)
    picture = codes.view(torch.float64).permute(0, 3, 1, 2)
    factor = 2.0 if size is None else None
    picture = functional.interpolate(picture, size=size, scale_factor=factor, mode="nearest")
    return picture.permute(0, 2, 3, 1).contiguous().view(torch.uint8)


def _doubled(codes: Tensor) -> Tensor:
    """Return each pixel four times: one copy, which takes half as long as to interpolate."""
    runs = codes.view(torch.complex128)
    b, h, w, c = runs.shape
    doubled = runs.reshape(b, h, 1, w, 1, c).expand(b, h, 2, w, 2, c)
    return doubled.reshape(b, 2 * h, 2 * w, c).view(torch.uint8)
