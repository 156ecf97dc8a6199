"""Norms that end in codes, one for all layers that read them.

Layers that read one norm have one scale: it comes from the same numbers. So the norm's codes are
made once, for queries, keys and values alike, and where an operation computes norm and codes in one
pass (on a GPU), 16 bit between them are never written.

Whoever waits for a call of a layer gets it, and so does an adapter: then the norm gives its 16 bit
to all of them. So it does where torch.compile quantizes by itself (``fusing``): its own kernel of
norm and codes was the fastest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.device.backends import forced
from quantkit.device.ops.table import name_for
from quantkit.inference.modules import PackedLinear, is_watched
from quantkit.inference.normed import Normed
from quantkit.inference.one_pass import has_kernel
from quantkit.inference.operators import operator_for

#: Parts that belong to a layer's input.
_OF_INPUT = ("input_scale", "input_smooth", "input_shift")
#: Columns come in runs of so many.
_ALIGNED = 8


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
    if readers and _is_one_pass(norm, readers[0], x):
        return x, _in_one_pass(norm, readers[0], x, modulation)
    y = norm(x)
    if modulation is not None:
        y = y * (1 + modulation.scale[:, None]) + modulation.shift[:, None]
    return x, readers[0].as_codes(y) if readers else y


def _is_one_pass(norm: Any, reader: PackedLinear, x: Tensor) -> bool:
    """Tell whether one operation computes the norm and its codes."""
    if type(norm) is not nn.LayerNorm or is_watched(norm) or not reader.takes_parts:
        return False
    numbers = norm._parameters  # noqa: SLF001  getattr takes ten times as long
    weight, bias = numbers["weight"], numbers["bias"]
    if weight is not None and weight.dtype is not x.dtype:
        return False
    if x.shape[-1] % _ALIGNED or (bias is not None and bias.dtype is not x.dtype):
        return False
    name = name_for("layer_norm_codes", reader.scheme.input.name)
    found: bool = has_kernel(name, str(x.device), x.shape[-1], forced())
    return found


def _in_one_pass(
    norm: nn.LayerNorm, reader: PackedLinear, x: Tensor, modulation: Modulation | None
) -> Normed:
    up, by = modulation or (None, None)
    smooth, shift, scale = reader.changes_of_input
    name = reader.scheme.input.name
    rows = x.reshape(-1, x.shape[-1])
    codes: Tensor = operator_for("layer_norm_codes", name)(
        rows, norm.weight, norm.bias, up, by, smooth, shift, scale, norm.eps, True, name
    )
    return Normed(codes, scale, x.shape, x.dtype)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
