"""First and last layers of a packed UNet in 16 bit with channels last.

Blocks whose norms write codes read and write pictures with channels last. torch's convolutions keep
the layout of their input, and its group norm copies a picture to channels first. Here the first
layer converts to channels last, quantkit computes the last norm and its SiLU, and the model returns
channels first, as usual. Only on a GPU, outside of torch.compile.

Modules are replaced by exact class; parameters are the same.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from quantkit.inference.blocks.picture_norms import (
    has_picture_kernel,
    norm_pictures,
    takes_channels,
)
from quantkit.inference.layers.modules import is_watched

_LAST = torch.channels_last
#: The attribute of a norm that holds the activation after it.
_ACTIVATION_AFTER = "activation_behind"


class FirstConv2d(nn.Conv2d):
    """A convolution that returns channels last on a GPU."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch names it
        """Return the convolution of ``input``."""
        if not input.is_cuda or torch.compiler.is_compiling():
            return super().forward(input)
        # Convolutions give what they are given, but for those of a Radeon.
        y = super().forward(input.contiguous(memory_format=_LAST))
        return y.contiguous(memory_format=_LAST)


class LastConv2d(nn.Conv2d):
    """A convolution that returns channels first."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch names it
        """Return the convolution of ``input``."""
        return super().forward(input).contiguous()


class ActivatedOutput(NamedTuple):
    """A norm's output with the activation applied, passed to the activation module."""

    y: Tensor


class LastGroupNorm(nn.GroupNorm):
    """A group norm that also computes the SiLU after it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch names it
        """Return the norm, or the activated output for a ``LastSiLU``."""
        activation: nn.Module = getattr(self, _ACTIVATION_AFTER)[0]
        if not _has_fused_op(self, activation, input):
            return super().forward(input)
        # Nothing but the activation sees it.
        return cast("Tensor", ActivatedOutput(norm_pictures(self, input, "silu")))


class LastSiLU(nn.SiLU):
    """A SiLU that the norm before it may have computed."""

    def forward(self, input: Tensor | ActivatedOutput) -> Tensor:  # noqa: A002  as torch names it
        """Return the activation of ``input``."""
        y: Tensor = input.y if isinstance(input, ActivatedOutput) else super().forward(input)
        return y


#: Attribute of a UNet -> torch's class, and its replacement.
_ENDS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "conv_in": (nn.Conv2d, FirstConv2d),
    "conv_norm_out": (nn.GroupNorm, LastGroupNorm),
    "conv_act": (nn.SiLU, LastSiLU),
    "conv_out": (nn.Conv2d, LastConv2d),
}


def install(model: nn.Module) -> None:
    """Let a UNet use channels last from its first to its last layer, where its blocks do."""
    # Called when there is a model: this module is imported while diffusers still is.
    from diffusers import UNet2DConditionModel
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    plain = {ResnetBlock2D, Transformer2DModel}
    if type(model) is not UNet2DConditionModel or any(type(m) in plain for m in model.modules()):
        return
    if any(type(getattr(model, name, None)) is not known for name, (known, _) in _ENDS.items()):
        return
    for name, (_, own) in _ENDS.items():
        getattr(model, name).__class__ = own
    setattr(model.conv_norm_out, _ACTIVATION_AFTER, (model.conv_act,))


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    for module, plain in _ends_of(model):
        module.__class__ = plain
        vars(module).pop(_ACTIVATION_AFTER, None)


def _ends_of(model: nn.Module) -> Iterator[tuple[Any, type[nn.Module]]]:
    for name, (plain, own) in _ENDS.items():
        if type(module := getattr(model, name, None)) is own:
            yield module, plain


def _has_fused_op(norm: LastGroupNorm, activation: nn.Module, x: Tensor) -> bool:
    """Tell whether one operation computes a norm and the activation after it."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if type(activation) is not LastSiLU or is_watched(norm) or is_watched(activation):
        return False
    return x.ndim == 4 and takes_channels(norm, x) and has_picture_kernel("group_norm", x.device)
