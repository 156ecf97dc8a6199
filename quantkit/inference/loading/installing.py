"""Installing a packed model's methods and attention after its layers."""

from torch import nn

from quantkit.checkpoint.packed_attention import PackedAttention
from quantkit.inference.attention import coded_attention, coded_projections, fused_qkv
from quantkit.inference.layers import head_scales, prompts, timestep_buckets
from quantkit.inference.layers.modules import PackedConv2d
from quantkit.inference.loading import model_methods
from quantkit.models.families import is_denoiser

#: What leaves something on a model that is packed no more.
_LASTING = (
    coded_attention,
    head_scales,
    model_methods,
    timestep_buckets,
    fused_qkv,
)


def install(model: nn.Module, packed: PackedAttention | None = None) -> None:
    """Let the modules of a packed model compute as its layers allow it.

    Args:
        model: with all packed layers in place.
        packed: attention as the checkpoint has it; None: diffusers' own.
    """
    model_methods.install(model)
    fused_qkv.install(model)
    prompts.install(model)
    coded_attention.install(model, packed)
    coded_projections.install(model)
    _defer_pictures(model)


def _defer_pictures(model: nn.Module) -> None:
    """Let convolutions wait for their readers, where no recorded step fuses the two."""
    if is_denoiser(type(model).__name__):
        return
    for module in model.modules():
        if isinstance(module, PackedConv2d):
            module.defers = True


def uninstall(model: nn.Module) -> None:
    """Undo ``install`` and the other changes of loading, once no layer is packed any more."""
    for installed in _LASTING:
        installed.uninstall(model)
