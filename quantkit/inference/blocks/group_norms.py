"""ResNet blocks of packed UNets with fused norms; see ``picture_norms`` and ``upsampling``.

A block is replaced by exact class, because diffusers' forward passes 16 bit from the norm to its
layer. Parameters and submodules are the same.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import name_for
from quantkit.inference.blocks import upsampling
from quantkit.inference.blocks.picture_norms import fits, is_coded, norm_codes, pixels
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.inference.layers.modules import PackedConv2d, PackedLinear, is_watched
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.scheme import Activation

_SILU = "silu"


class CodedResnetBlock(ResnetBlock2D):  # type: ignore[misc]  # diffusers' own class is untyped
    """A ResnetBlock2D whose convolutions are packed; parameters and submodules are the same."""

    def forward(
        self, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the output of ResnetBlock2D, with channels last where its norms write codes."""
        pairs = ((self.norm1, self.conv1), (self.norm2, self.conv2))
        plain = (self.nonlinearity, self.dropout)
        if self.training or not is_coded(input_tensor, pairs, plain):
            y: Tensor = super().forward(input_tensor, temb, *args, **kwargs)
            return y
        x = input_tensor.contiguous(memory_format=torch.channels_last)
        codes = _codes(pixels(x), None, self.norm1, self.conv1)
        hidden = self.conv1.convolve_codes(codes, x.dtype)
        codes = _codes(hidden, self._embedded(temb), self.norm2, self.conv2)
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        alike = x.dtype is hidden.dtype and self.output_scale_factor == 1
        if alike and _adds(self.conv2, x):
            summed: Tensor = self.conv2.add_convolved(codes, pixels(x))
            return summed.permute(0, 3, 1, 2)
        y = x + self.conv2.convolve_codes(codes, hidden.dtype).permute(0, 3, 1, 2)
        return y if self.output_scale_factor == 1 else y / self.output_scale_factor

    def _embedded(self, temb: Tensor | None) -> Tensor | None:
        """Return the embedding that is added to every pixel, (B, C)."""
        if self.time_emb_proj is None or temb is None:
            return temb
        projected: Tensor = self.time_emb_proj(
            temb if self.skip_time_act else self.nonlinearity(temb)
        )
        return projected


def _adds(conv: PackedConv2d, x: Tensor) -> bool:
    """Tell whether a convolution's kernel adds its product to a picture (B, N, H, W)."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if torch.compiler.is_compiling() or differentiated or is_watched(conv):
        return False
    scheme = conv.scheme
    if scheme.activation is Activation.NONE or isinstance(scheme.granularity, PerGroup):
        return False
    kinds, sparse = (scheme.input.name, scheme.codes.name), scheme.sparsity is not None
    name = name_for("conv_residual", *kinds, sparse=sparse)
    return x.dtype in IO_DTYPES.values() and has_kernel(name, str(x.device), conv.k)


def _fits_resnet(block: Any) -> bool:
    plain = block.upsample is None and block.downsample is None
    return (
        plain
        and type(block.nonlinearity) is nn.SiLU
        and block.time_embedding_norm == "default"
        and fits(block.norm1, block.conv1)
        and fits(block.norm2, block.conv2)
    )


def _fits_transformer(model: Any) -> bool:
    norm, linear = getattr(model, "norm", None), getattr(model, "proj_in", None)
    rows: bool = getattr(model, "use_linear_projection", False)
    return rows and type(linear) is PackedLinear and fits(norm, linear)


@lru_cache(maxsize=1)
def _classes() -> dict[type, tuple[Callable[[Any], bool], type]]:
    """Return class -> predicate for modules that can be replaced, and the new class.

    Called when there is a model: this module is imported while diffusers still is.
    """
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    from quantkit.inference.blocks.coded_transformer import CodedTransformer2DModel

    return {
        ResnetBlock2D: (_fits_resnet, CodedResnetBlock),
        Upsample2D: (upsampling.fits, upsampling.CodedUpsample2D),
        Transformer2DModel: (_fits_transformer, CodedTransformer2DModel),
    }


def install(model: nn.Module) -> None:
    """Let norms and upsamplers write codes where the layers after them allow it."""
    for module in model.modules():
        if type(module) in _classes():
            can_be, coded = _classes()[type(module)]
            if can_be(module):
                module.__class__ = coded


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    own = {coded: known for known, (_, coded) in _classes().items()}
    for module in model.modules():
        module.__class__ = own.get(type(module), type(module))


def _codes(x: Tensor, added: Tensor | None, norm: nn.GroupNorm, conv: PackedConv2d) -> Tensor:
    """Return the convolution's codes of the norm of (B, H, W, C), with SiLU."""
    return norm_codes(x.flatten(1, 2), added, norm, conv, _SILU).reshape(x.shape)
