"""Which modules of a denoiser are reconstructed as one: the smallest that diffusers repeats."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

#: Class names. What stands in none of them is fitted layer by layer.
BLOCKS = frozenset({
    # UNets
    "ResnetBlock2D", "Downsample2D", "Upsample2D", "BasicTransformerBlock",
    # transformers
    "JointTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock",
    "HunyuanDiTBlock", "LuminaNextDiTBlock", "AuraFlowJointTransformerBlock",
    "AuraFlowSingleTransformerBlock", "CogView3PlusTransformerBlock", "SanaTransformerBlock",
    "QwenImageTransformerBlock",
})  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Masked layers that are fitted to one answer."""

    #: module path of the block, or of a single layer
    name: str
    #: module paths
    layers: tuple[str, ...]

    @property
    def single(self) -> bool:
        """Whether it is a layer that stands in no block."""
        return self.layers == (self.name,)


def find_blocks(denoiser: nn.Module, layers: Collection[str]) -> tuple[Block, ...]:
    """Return the blocks that hold masked layers, each layer in one.

    Args:
        denoiser: whose module tree it is; a block inside another belongs to the outer one.
        layers: module paths of the masked layers.
    """
    homes: dict[str, list[str]] = {}
    for layer in layers:
        homes.setdefault(_home(denoiser, layer), []).append(layer)
    return tuple(Block(name, tuple(inside)) for name, inside in homes.items())


def _home(denoiser: nn.Module, layer: str) -> str:
    parts = layer.split(".")
    for count in range(1, len(parts)):
        path = ".".join(parts[:count])
        if type(denoiser.get_submodule(path)).__name__ in BLOCKS:
            return path
    return layer
