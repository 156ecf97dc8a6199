"""Group norms of packed models that write codes: no tensor between a norm and its layer.

diffusers normalises a picture, applies SiLU, and gives it to a convolution, which changes its
layout and quantizes it: four passes over 16 bit. Here the norm's kernels read it with channels
last, as it comes from the layer before, and write codes. Only on a GPU, outside of torch.compile,
which joins these on its own, and only where nobody looks at a layer (hooks, offloading, adapters).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import name_for
from quantkit.inference.modules import PackedConv2d, PackedLinear, is_watched
from quantkit.inference.operators import OPERATORS, operator_for
from quantkit.numerics.scheme import Activation

#: Channels of a picture must be a multiple of it.
_ALIGNED = 8
_SILU = "silu"


class CodedResnetBlock(ResnetBlock2D):  # type: ignore[misc]  # diffusers' own class is untyped
    """A ResnetBlock2D whose convolutions are packed; parameters and submodules are the same."""

    def forward(
        self, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return what ResnetBlock2D returns, with channels last where its norms write codes."""
        pairs = ((self.norm1, self.conv1), (self.norm2, self.conv2))
        plain = (self.nonlinearity, self.dropout)
        if self.training or not is_coded(input_tensor, pairs, plain):
            y: Tensor = super().forward(input_tensor, temb, *args, **kwargs)
            return y
        x = input_tensor.contiguous(memory_format=torch.channels_last)
        hidden = _convolved(pixels(x), None, self.norm1, self.conv1)
        hidden = _convolved(hidden, self._embedded(temb), self.norm2, self.conv2)
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        y = x + hidden.permute(0, 3, 1, 2)
        return y if self.output_scale_factor == 1 else y / self.output_scale_factor

    def _embedded(self, temb: Tensor | None) -> Tensor | None:
        """Return what is added to every pixel, (B, C)."""
        if self.time_emb_proj is None or temb is None:
            return temb
        projected: Tensor = self.time_emb_proj(
            temb if self.skip_time_act else self.nonlinearity(temb)
        )
        return projected


def _fits_resnet(block: Any) -> bool:
    plain = block.upsample is None and block.downsample is None
    return (
        plain
        and type(block.nonlinearity) is nn.SiLU
        and block.time_embedding_norm == "default"
        and _fits(block.norm1, block.conv1)
        and _fits(block.norm2, block.conv2)
    )


def _fits_transformer(model: Any) -> bool:
    norm, linear = getattr(model, "norm", None), getattr(model, "proj_in", None)
    rows: bool = getattr(model, "use_linear_projection", False)
    return rows and type(linear) is PackedLinear and _fits(norm, linear)


@lru_cache(maxsize=1)
def _classes() -> dict[type, tuple[Callable[[Any], bool], type]]:
    """Return class -> whether a module of it can have codes from its norms, and what it becomes.

    Called when there is a model: this module is imported while diffusers still is.
    """
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    from quantkit.inference.coded_transformer import CodedTransformer2DModel

    return {
        ResnetBlock2D: (_fits_resnet, CodedResnetBlock),
        Transformer2DModel: (_fits_transformer, CodedTransformer2DModel),
    }


def install(model: nn.Module) -> None:
    """Let norms write codes where the layers behind them allow it."""
    for module in model.modules():
        if type(module) in _classes():
            fits, coded = _classes()[type(module)]
            if fits(module):
                module.__class__ = coded


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    own = {coded: known for known, (_, coded) in _classes().items()}
    for module in model.modules():
        module.__class__ = own.get(type(module), type(module))


def _fits(norm: Any, layer: Any) -> bool:
    """Tell whether the codes of what a norm gives are all that its layer reads."""
    if type(norm) is not nn.GroupNorm or type(layer) not in (PackedConv2d, PackedLinear):
        return False
    scheme = layer.scheme
    one_term = scheme.activation is Activation.STATIC and scheme.terms == 1
    # What stands outside of a picture is zero before a convolution's shift.
    shifted = scheme.shift and type(layer) is PackedConv2d
    aligned: bool = norm.num_channels % _ALIGNED == 0
    return one_term and not shifted and aligned and norm.affine


def is_coded(x: Tensor, pairs: tuple[tuple[Any, Any], ...], others: tuple[Any, ...]) -> bool:
    """Tell whether codes are written of x.

    Args:
        x: a picture.
        pairs: norms, and the layers behind them.
        others: modules whose calls are left out.
    """
    if torch.compiler.is_compiling() or x.dtype not in IO_DTYPES.values() or not x.numel():
        return False
    return not any(map(is_watched, others)) and all(_is_pair(x, *pair) for pair in pairs)


def _is_pair(x: Tensor, norm: Any, layer: Any) -> bool:
    # Adapters take a layer's place.
    if not _fits(norm, layer) or is_watched(norm) or is_watched(layer):
        return False
    same = norm.weight.dtype is x.dtype and norm.bias.dtype is x.dtype
    return same and _has_kernel(name_for("group_norm_codes", layer.scheme.input.name), x.device)


def _has_kernel(op: str, device: torch.device) -> bool:
    return device.type == "cuda" and choose(op, device, k=_ALIGNED).backend is Backend.GPU


def pixels(x: Tensor) -> Tensor:
    """Return a picture that has channels last in memory as (B, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def _convolved(x: Tensor, added: Tensor | None, norm: nn.GroupNorm, conv: PackedConv2d) -> Tensor:
    """Return the convolution, (B, H, W, N), of the norm of (B, H, W, C), with SiLU."""
    codes = norm_codes(x.flatten(1, 2), added, norm, conv, _SILU)
    return conv.convolve_codes(codes.reshape(x.shape), x.dtype)


def norm_codes(
    x: Tensor,
    added: Tensor | None,
    norm: nn.GroupNorm,
    layer: PackedConv2d | PackedLinear,
    activation: str,
) -> Tensor:
    """Return the layer's codes of the norm of (B, T, C) + added (B, C)."""
    partials = OPERATORS["group_partials"](x, added)
    moments = OPERATORS["group_moments"](partials, x.shape[1], norm.num_groups, norm.eps)
    fmt = layer.scheme.input.name
    write = operator_for("group_norm_codes", fmt)
    codes: Tensor = write(
        x, added, moments, norm.weight, norm.bias, layer.input_smooth, layer.shift,
        layer.static_scale, activation, fmt,
    )  # fmt: skip
    return codes
