"""What loading gives a packed model beside its layers: methods, networks, norms, attention."""

from torch import nn

from quantkit.checkpoint.attention import PackedAttention
from quantkit.inference import (
    attention,
    buckets,
    coded_projections,
    feed_forward,
    group_norms,
    head_scales,
    methods,
    projections,
    prompts,
    unet_ends,
)

#: What leaves something on a model that is packed no more.
_LASTING = (
    attention,
    head_scales,
    methods,
    buckets,
    feed_forward,
    group_norms,
    unet_ends,
    projections,
)


def install(model: nn.Module, packed: PackedAttention | None = None) -> None:
    """Let the modules of a packed model compute as its layers allow it.

    Args:
        model: with all packed layers in place.
        packed: attention as the checkpoint has it; None: diffusers' own.
    """
    # The classes that it replaces import diffusers' quantizers, which import this.
    from quantkit.inference import normed_blocks, up_blocks

    methods.install(model)
    projections.install(model)
    feed_forward.install(model)
    group_norms.install(model)
    unet_ends.install(model)
    prompts.install(model)
    normed_blocks.install(model)
    up_blocks.install(model)
    attention.install(model, packed)
    coded_projections.install(model)


def uninstall(model: nn.Module) -> None:
    """Undo ``install``, and what loading did beside it, once no layer is packed any more."""
    # Likewise.
    from quantkit.inference import normed_blocks, up_blocks

    for installed in (*_LASTING, normed_blocks, up_blocks):
        installed.uninstall(model)
