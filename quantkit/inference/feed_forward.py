"""GEGLU networks of packed models: the first layer's kernel gates and quantizes for the second.

diffusers' FeedForward writes the product, reads half of it for gelu, writes that, reads both to
multiply, writes that, and reads it again to quantize it: 16 bit each time. On a GPU the codes are
all that leaves the first product (``device.ops.geglu``). On the CPU, and wherever somebody looks at
a layer or moves it (hooks, offloading), the modules are called one by one.
"""

from typing import Any

import torch
from diffusers.models.activations import GEGLU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from quantkit.device.backends import Backend
from quantkit.device.choosing import choose
from quantkit.device.ops.table import name_for
from quantkit.inference.modules import PackedLinear, is_watched
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.scheme import Activation


class GatedFeedForward(FeedForward):  # type: ignore[misc]  # diffusers' own class is untyped
    """A FeedForward whose layers are packed; parameters and submodules are the same."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what FeedForward returns, (..., dim_out), fused where that is possible."""
        up, down = self.net[0].proj, self.net[2]
        if self.training or not _is_fused(hidden_states.device, up, down):
            y: Tensor = super().forward(hidden_states, *args, **kwargs)
        else:
            codes = up.gated_codes(hidden_states, down)
            y = down.multiply_codes(codes, hidden_states.dtype)
            y = y.reshape(*hidden_states.shape[:-1], down.n)
        return y


def install(model: nn.Module) -> None:
    """Let the GEGLU networks of a packed model fuse where their layers allow it."""
    for module in model.modules():
        if type(module) is FeedForward and _fits(module):
            module.__class__ = GatedFeedForward


def uninstall(model: nn.Module) -> None:
    """Undo ``install``."""
    for module in model.modules():
        if type(module) is GatedFeedForward:
            module.__class__ = FeedForward


def _fits(module: FeedForward) -> bool:
    up, down = getattr(module.net[0], "proj", None), module.net[2]
    if type(module.net[0]) is not GEGLU or type(up) is not PackedLinear:
        return False
    one_term = up.scheme.activation is not Activation.NONE and up.scheme.terms == 1
    grouped = isinstance(up.scheme.granularity, PerGroup)
    if not one_term or grouped or type(down) is not PackedLinear or not down.takes_codes:
        return False
    # A kernel writes codes of the kind that it reads.
    same_kind: bool = up.scheme.input.is_integer is down.scheme.input.is_integer
    return same_kind


def _is_fused(device: torch.device, up: Any, down: Any) -> bool:
    if not (_is_plain(up) and _is_plain(down)):
        return False
    sparse = up.weight_meta is not None
    name = name_for("geglu", up.scheme.input.name, up.scheme.codes.name, sparse=sparse)
    fused: bool = _has_kernel(name, str(device), up.k)
    return fused


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether a call of the layer does nothing but multiply; adapters replace it."""
    return type(layer) is PackedLinear and not is_watched(layer)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(op: str, device: str, k: int) -> bool:
    where = torch.device(device)
    return where.type == "cuda" and choose(op, where, k=k).backend is Backend.GPU
