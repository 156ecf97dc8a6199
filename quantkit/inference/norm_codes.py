"""Norms that end in codes, one for all layers that read them.

Layers that read one norm have one scale: it comes from the same numbers. So the norm's codes are made
once, for queries, keys and values alike, and where an operation computes norm and codes in one pass
(on a GPU), 16 bit between them are never written.

Whoever waits for a call of a layer gets it, and so does an adapter: then the norm gives its 16 bit to
all of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.inference.modules import PackedLinear, is_watched
from quantkit.inference.normed import Normed
from quantkit.inference.projections import JoinedLinear
from quantkit.inference.prompts import is_plain

#: Parts that belong to a layer's input.
_OF_INPUT = ("input_scale", "input_smooth", "input_shift")


class Modulation(NamedTuple):
    """What AdaLN does behind a norm: ``norm(x) * (1 + scale) + shift``, each (B, K)."""

    scale: Tensor
    shift: Tensor


class Branch(NamedTuple):
    """What is added before a norm: ``gate * x``, x as the norm's input, gate (B, K) or None."""

    x: Tensor
    gate: Tensor | None = None

    def added_to(self, x: Tensor) -> Tensor:
        """Return the sum as diffusers' blocks compute it."""
        return x + (self.x if self.gate is None else self.gate.unsqueeze(1) * self.x)


def read_alike(layers: Sequence[Any]) -> bool:
    """Tell whether layers read an input as the same codes: packed, of one term, of one scale."""
    first = layers[0]
    if not all(isinstance(layer, PackedLinear) and layer.takes_term for layer in layers):
        return False
    return all(
        layer.scheme.input is first.scheme.input
        and layer.scheme.activation is first.scheme.activation
        and layer.scheme.buckets == first.scheme.buckets
        and all(_same(getattr(layer, part), getattr(first, part)) for part in _OF_INPUT)
        for layer in layers[1:]
    )


def layer_normed(
    norm: Any,
    readers: Sequence[Any],
    x: Tensor,
    branch: Branch | None = None,
    modulation: Modulation | None = None,
) -> tuple[Tensor, Tensor | Normed]:
    """Return the sum that is normed, and its norm for the layers that read it.

    Args:
        norm: a LayerNorm.
        readers: layers that ``read_alike``; none: the norm's 16 bit are wanted.
        x: (B, T, K).
        branch: is added before.
        modulation: of the norm.
    """
    x = x if branch is None else branch.added_to(x)
    y = norm(x)
    if modulation is not None:
        y = y * (1 + modulation.scale[:, None]) + modulation.shift[:, None]
    if not readers or not all(map(_is_plain, readers)):
        return x, y
    return x, readers[0].as_codes(y)


def _is_plain(layer: Any) -> bool:
    if isinstance(layer, JoinedLinear):
        return layer.is_whole and not is_watched(layer)
    return is_plain(layer)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
