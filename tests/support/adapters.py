"""LoRAs of packed models, and by hand what they add to outputs."""

import torch
from torch import nn

from quantkit.inference.layers.layer_summary import iterate_packed

RANK = 4


def branches(model, seed, *, names=None, rank=RANK):
    """Return a LoRA of every packed layer as a state dict of diffusers, without a prefix."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for _, name, layer in iterate_packed(model):
        if names is not None and name not in names:
            continue
        n, k, *kernel = layer.dense_shape
        shapes = {"A": (rank, k, *kernel), "B": (n, rank, *(1 for _ in kernel))}
        for part, shape in shapes.items():
            value = torch.randn(shape, generator=generator) * 0.1
            state[f"{name}.lora_{part}.weight"] = value
    return state


class ByHand:
    """The oracle: forward hooks that add what adapters say to the outputs of packed layers."""

    def __init__(self, model, *adapters):
        self.model, self.adapters = model, adapters

    def __enter__(self):
        layers = {name: layer for _, name, layer in iterate_packed(self.model)}
        self.handles = [
            layers[key.removesuffix(".lora_A.weight")].register_forward_hook(
                self.hook(key, state, scale)
            )
            for state, scale in self.adapters for key in state if key.endswith("A.weight")
        ]  # fmt: skip
        return self.model

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    @staticmethod
    def hook(key, state, scale):
        down, up = state[key], state[key.replace("lora_A", "lora_B")]

        def add(layer, args, output):
            x = args[0].to(down.dtype)
            if layer.kind == "linear":
                return output + scale * (x @ down.T @ up.T)
            options = (layer.stride, layer.padding, layer.dilation)
            return output + scale * nn.functional.conv2d(
                nn.functional.conv2d(x, down, None, *options), up
            )

        return add
