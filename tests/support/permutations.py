"""Tiny models of every family with channels that may change places."""

import torch

from quantkit.models.channel_couplings import find_couplings
from quantkit.models.layers import list_layers
from quantkit.sparsity.channel_permutation import attention_heads
from tests.support.pipelines import (
    tiny_flux_pipeline,
    tiny_pipeline,
    tiny_transformer,
    tiny_transformer_pipeline,
)

WEIGHTS = "diffusion_pytorch_model.safetensors"

PIPELINES = {
    "unet": tiny_pipeline,
    "sd3": tiny_transformer_pipeline,
    "flux": tiny_flux_pipeline,
    "pixart": tiny_transformer,
}


def random_power(n, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=g).square() * torch.rand(k, generator=g)


def couplings_of(model):
    component = model.components[0]
    layers = {layer.name: layer for layer in list_layers(component)}
    return find_couplings(component, layers, attention_heads(component))
