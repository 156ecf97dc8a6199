"""``model.dequantize()``: packed layers replaced by dense ones with dequantized weights."""

from typing import Any

import torch
from torch import nn

from quantkit.errors import InputError
from quantkit.inference.attention import fused_qkv
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.inference.loading import installing


def dequantize(model: nn.Module) -> nn.Module:
    """Replace packed layers by dense ones in the model's dtype, and undo what was installed.

    Weights are the codes' values, smoothing folded in. Inputs are not quantized any more, so
    scales and shifts of inputs have nothing to do, and go.

    Raises:
        InputError: weights are offloaded, so they are not there.
    """
    layers = [(name, layer) for _, name, layer in iterate_packed(model)]
    if any(layer.codes.is_meta for _, layer in layers):
        raise InputError(
            f"dequantize: {type(model).__name__} is offloaded; call remove_all_hooks() on the "
            "pipeline, or load it without offloading"
        )
    fused = fused_qkv.separate(model)
    for name, layer in layers:
        if not isinstance(layer, fused_qkv.JoinedLinear):
            model.set_submodule(name, as_dense(layer))
    installing.uninstall(model)
    for module in fused:
        fused_qkv.fuse_projections(module)
    return model


@torch.no_grad()
def as_dense(layer: PackedLayer) -> nn.Module:
    """Return an nn.Linear or nn.Conv2d with a packed layer's dequantized weight."""
    attributes = layer.dense_class.__constants__
    options: Any = {name: getattr(layer, name) for name in attributes if name != "output_padding"}
    dense: Any = layer.dense_class(**options, bias=layer.bias is not None, device="meta")
    dense.weight = nn.Parameter(layer.dense_weight())
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach())
    made: nn.Module = dense.train(layer.training)
    return made
