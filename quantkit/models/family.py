"""The type of a model family: layers that stay in 16 bit, with reasons, and what is no layer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.recipe.fields import matches

CONDITION = "embeds timestep or condition: one row per image, and its error reaches every layer"
TEXT = "embeds the prompt once per image; its error reaches every block"
MODULATION = "scales and shifts whole channels from one row per image: nothing to gain in speed"
FIRST = "reads the latent: few channels, and its error reaches every layer"
LAST = "writes the latent: its error is the picture's"
FEW = "writes few channels, as a router or a gate does: no bytes to gain, and whole tokens to lose"
UNKNOWN = "outside of the blocks, of no role that its name or shape tells"

#: What a recipe may pack as weights alone: not what reads or writes the latent, a per mille of the
#: bytes and all of the picture, and no router.
_ALONE = frozenset({CONDITION, TEXT, MODULATION, UNKNOWN})
#: In the path of a module that is one of a row of blocks.
_BLOCK = re.compile(r"\.\d+\.\D")


@dataclass(frozen=True)
class Keep:
    """Layers that stay in 16 bit."""

    #: glob on the module path
    pattern: str
    reason: str
    #: only outside of numbered blocks
    outside: bool = False
    #: only with at least so many output channels for each input channel
    widening: float = 0
    #: only with at least so many input channels for each output channel
    narrowing: float = 0

    def holds(self, layer: str, shape: Sequence[int]) -> bool:
        """Tell whether it includes a layer, by its module path and its weight's shape."""
        outputs, inputs = shape[:2]
        return (
            matches(layer, (self.pattern,))
            and not (self.outside and _BLOCK.search(layer))
            and outputs >= self.widening * inputs
            and inputs >= self.narrowing * outputs
        )


@dataclass(frozen=True)
class Family:
    """The denoisers that share a module structure."""

    name: str
    #: ``_class_name`` in config.json; empty: any
    class_names: tuple[str, ...]
    #: the first that holds gives the reason
    keep: tuple[Keep, ...]
    #: globs on modules whose 2-D or 4-D weight is not that of a Linear or a dense Conv2d:
    #: embedding tables, grouped convolutions
    not_layers: tuple[str, ...] = ()
    #: what is a layer is asked of the model that diffusers builds, not told by the weights' shapes
    by_structure: bool = False
    #: of tuned recipes: how pipelines are run for statistics, as keys of a calibration section
    calibration: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: name of a tuned recipe -> keys that stand where it sets none
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def packs_alone(self, layer: str, shape: Sequence[int]) -> bool:
        """Return whether a recipe may pack a kept layer, as a weight alone."""
        return self.keep_reason(layer, shape) in _ALONE

    def is_doubtful(self, layer: str, shape: Sequence[int]) -> bool:
        """Return whether only a layer's error on real inputs can tell if it may be packed."""
        return self.keep_reason(layer, shape) == UNKNOWN

    def keep_reason(self, layer: str, shape: Sequence[int]) -> str | None:
        """Return why the layer stays in 16 bit, or None when it is packed.

        Args:
            layer: its module path.
            shape: of its weight: (N, K), or (N, C, kh, kw).
        """
        for keep in self.keep:
            if keep.holds(layer, shape):
                return keep.reason
        return None
