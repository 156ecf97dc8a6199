"""Feed-forward networks of packed models, with activation and quantization fused.

With GEGLU, diffusers' FeedForward writes the product, reads half of it for gelu, writes that, reads
both to multiply, writes that, and reads it again to quantize it: 16 bit each time. On a GPU the
first product writes codes only (``device.ops.geglu``), and with GELU or SiLU as well
(``activation_codes``), in a kernel of its own where the first layer is not packed. On the CPU, and
wherever a layer has hooks or is offloaded, the modules are called one by one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.activations import GEGLU, GELU, LinearActivation
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from quantkit.device.ops.table import name_for
from quantkit.inference.blocks.activation_codes import (
    activated,
    has_fused_op,
    has_fused_product,
    projected,
    word_of,
)
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.inference.layers.modules import PackedLinear, is_watched
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.numerics.granularity import PerGroup


class GatedFeedForward(FeedForward):  # type: ignore[misc]  # diffusers' own class is untyped
    """A FeedForward whose layers are packed; parameters and submodules are the same."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of FeedForward, (..., dim_out), fused where that is possible."""
        up, down = self.net[0].proj, self.net[2]
        if self.training or not _is_fused(hidden_states.device, up, down):
            y: Tensor = super().forward(hidden_states, *args, **kwargs)
        else:
            codes, rows = up.gated_codes(hidden_states, down), hidden_states.shape[:-1]
            shape = torch.Size((*rows, down.k))
            y = down(QuantizedInput(codes, down.static_scale, shape, hidden_states.dtype))
        return y


class ActivatedFeedForward(FeedForward):  # type: ignore[misc]  # as above
    """A FeedForward with GELU or SiLU whose last layer is packed."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of FeedForward, (..., dim_out), fused where that is possible."""
        activation, dropout, down, *others = self.net
        plain = not (self.training or is_watched(dropout))
        x, up = hidden_states, activation.proj
        if plain and has_fused_product(up, activation, down, x):
            y: Tensor = down(projected(up, activation, down, x))
        elif plain and has_fused_op(activation, down, x):
            y = down(activated(activation, down, up(x)))
        else:
            whole: Tensor = super().forward(x, *args, **kwargs)
            return whole
        for module in others:
            y = module(y)
        return y


def install(model: nn.Module) -> None:
    """Let the networks of a packed model fuse where their layers allow it."""
    for module in model.modules():
        if type(module) is FeedForward:
            fitting = (coded for coded, fits in _CLASSES.items() if fits(module))
            module.__class__ = next(fitting, FeedForward)


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    for module in model.modules():
        if type(module) in _CLASSES:
            module.__class__ = FeedForward


def _fits_gated(module: FeedForward) -> bool:
    up, down = getattr(module.net[0], "proj", None), module.net[2]
    if type(module.net[0]) is not GEGLU or type(up) is not PackedLinear:
        return False
    grouped = isinstance(up.scheme.granularity, PerGroup)
    if not up.quantizes_input or grouped or type(down) is not PackedLinear or not down.takes_codes:
        return False
    # A kernel writes codes of the kind that it reads.
    same_kind: bool = up.scheme.input.is_integer is down.scheme.input.is_integer
    return same_kind


def _fits_activated(module: FeedForward) -> bool:
    activation, _, down, *_ = module.net
    if type(activation) not in (GELU, LinearActivation) or word_of(activation) is None:
        return False
    return type(down) is PackedLinear and down.takes_parts


#: New class of a network -> predicate for networks that fit it.
_CLASSES: Mapping[type[FeedForward], Callable[[FeedForward], bool]] = {
    GatedFeedForward: _fits_gated,
    ActivatedFeedForward: _fits_activated,
}


def _is_fused(device: torch.device, up: Any, down: Any) -> bool:
    if not (_is_plain(up) and _is_plain(down)):
        return False
    sparse = up.weight_meta is not None
    name = name_for("geglu", up.scheme.input.name, up.scheme.codes.name, sparse=sparse)
    fused: bool = has_kernel(name, str(device), up.k)
    return fused


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether a call of the layer only multiplies; adapters replace it."""
    return type(layer) is PackedLinear and not is_watched(layer)
