"""Which packed layers read a norm of a block, and whether anything else does."""

from typing import Any

from diffusers.models.activations import GEGLU, GELU, ApproximateGELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention

from quantkit.inference.attention import plain_class
from quantkit.inference.feed_forward import GatedFeedForward
from quantkit.inference.modules import is_watched
from quantkit.inference.projections import JOINED

#: Networks and activations whose first layer is all that reads their input.
_NETWORKS = (FeedForward, GatedFeedForward)
_ACTIVATIONS = (GEGLU, GELU, ApproximateGELU)
_ATTENTION = (Attention, FluxAttention)
#: What else attention may do to its input.
_OTHERS = ("spatial_norm", "group_norm", "residual_connection")
#: Processors that ask their input for its shape and dtype, and project it.
_PROCESSORS = frozenset({
    "AttnProcessor2_0", "FusedAttnProcessor2_0", "JointAttnProcessor2_0",
    "FusedJointAttnProcessor2_0", "FluxAttnProcessor",
})  # fmt: skip


def layers_at(block: Any, paths: tuple[str, ...]) -> list[Any]:
    """Return the layers that read an input of a block; none where more than layers reads it.

    Args:
        block: of diffusers.
        paths: a layer, a FeedForward, or an attention module and one of its layers or of JOINED,
            which stands for what it joins until that is done.
    """
    found = [_layers(block, path) for path in paths]
    return [layer for layers in found for layer in layers] if all(found) else []


def _layers(block: Any, path: str) -> list[Any]:
    owner, _, name = path.partition(".")
    module = getattr(block, owner)
    if not name:
        return [module] if not isinstance(module, FeedForward) else _first_of(module)
    if not _only_projects(module):
        return []
    if name not in JOINED:
        return [getattr(module, name)]
    fused = getattr(module, "fused_projections", False)
    return [getattr(module, part, None) for part in ((name,) if fused else JOINED[name])]


def _first_of(network: Any) -> list[Any]:
    activation = network.net[0]
    if type(network) not in _NETWORKS or type(activation) not in _ACTIVATIONS:
        return []
    return [] if is_watched(network) or is_watched(activation) else [activation.proj]


def _only_projects(attention: Any) -> bool:
    """Tell whether attention does nothing to its input but project it."""
    if type(attention) not in _ATTENTION or is_watched(attention):
        return False
    changed = any(getattr(attention, name, None) for name in _OTHERS)
    return not changed and plain_class(attention.processor).__name__ in _PROCESSORS
