"""The packed layers that read a block's norm, and whether anything else reads it."""

from collections.abc import Iterable
from typing import Any

import torch
from diffusers.models.activations import GEGLU, GELU, ApproximateGELU, LinearActivation
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import nn

from quantkit.inference.attention.coded_attention import plain_class
from quantkit.inference.attention.fused_qkv import JOINED, JoinedLinear
from quantkit.inference.blocks.feed_forward import ActivatedFeedForward, GatedFeedForward
from quantkit.inference.layers.modules import is_watched
from quantkit.inference.layers.prompts import is_plain

#: Networks and activations whose first layer is all that reads their input.
_NETWORKS = (FeedForward, GatedFeedForward, ActivatedFeedForward)
_ACTIVATIONS = (GEGLU, GELU, ApproximateGELU, LinearActivation)
_ATTENTION = (Attention, FluxAttention)
#: What else attention may do to its input.
_OTHERS = ("spatial_norm", "group_norm", "residual_connection")
#: Processors that ask their input for its shape and dtype, and project it.
_PROCESSORS = frozenset({
    "AttnProcessor2_0", "FusedAttnProcessor2_0", "JointAttnProcessor2_0",
    "FusedJointAttnProcessor2_0", "FluxAttnProcessor",
})  # fmt: skip


class Readers:
    """The layers that read a norm of a block, found once; every call checks that they still do.

    Finding them in every call would cost as much as the operation that they save.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []
        #: table, name and what stands there: adapters and ``set_processor`` put something else in
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        #: namespaces of modules that may not have hooks
        self._watched: list[dict[str, Any]] = []

    def hold(self) -> bool:
        """Tell whether no place was taken and no module got hooks."""
        for table, name, value in self._places:
            if table.get(name) is not value:
                return False
        for own in self._watched:
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                return False
        return True

    def add(self, owner: nn.Module, names: Iterable[str]) -> None:
        """Add layers of a module, where all are plain packed ones; else none reads codes."""
        for name in names:
            layer = self.module(owner, name)
            if isinstance(layer, JoinedLinear):
                if not layer.is_whole:
                    raise _Unknown
                attention, parts = layer.layers
                for part in parts:
                    self.module(attention, part)
            elif not is_plain(layer):
                raise _Unknown
            self.layers.append(layer)

    def module(self, owner: nn.Module, name: str) -> Any:
        """Return a module's child, which must not be replaced or get hooks from now on."""
        found = owner._modules.get(name)  # noqa: SLF001  getattr takes ten times as long
        if found is None or is_watched(found):
            raise _Unknown
        self._places.append((owner._modules, name, found))  # noqa: SLF001  as above
        self._watched.append(vars(found))
        return found

    def value(self, owner: nn.Module, name: str) -> Any:
        """Return a module's attribute, which must not be replaced from now on."""
        found = vars(owner).get(name)
        self._places.append((vars(owner), name, found))
        return found


class _Unknown(Exception):  # noqa: N818  no error: something else than packed layers reads the norm
    """A reader of the norm needs 16 bit."""


def readers_at(block: nn.Module, paths: tuple[str, ...]) -> Readers | None:
    """Return the layers that read an input of a block; None where more than layers reads it.

    Args:
        block: of diffusers.
        paths: a layer, a FeedForward, or an attention module and one of its layers or of JOINED,
            which stands for what it joins until that is done.
    """
    found = Readers()
    try:
        for path in paths:
            _add(found, block, path)
    except _Unknown:
        return None
    return found


def _add(found: Readers, block: nn.Module, path: str) -> None:
    owner, _, name = path.partition(".")
    if name:
        module = found.module(block, owner)
        _check_attention(found, module)
        fused = found.value(module, "fused_projections")
        found.add(module, (name,) if fused or name not in JOINED else JOINED[name])
    elif isinstance(block._modules.get(owner), FeedForward):  # noqa: SLF001  as above
        network = found.module(block, owner)
        activation = found.module(found.module(network, "net"), "0")
        if type(network) not in _NETWORKS or type(activation) not in _ACTIVATIONS:
            raise _Unknown
        found.add(activation, ("proj",))
    else:
        found.add(block, (owner,))


def end_at(block: nn.Module, path: str) -> Readers | None:
    """Return the layer that computes the output of a part of a block; None where more is done.

    Args:
        block: of diffusers.
        path: a FeedForward, or an attention module and its to_out or to_add_out.
    """
    found, (owner, _, name) = Readers(), path.partition(".")
    try:
        module = found.module(block, owner)
        (_check_unscaled if name else _check_network)(found, module)
        if name == "to_add_out":
            found.add(module, (name,))
        else:
            _add_last(found, found.module(module, name or "net"), 0 if name else 2)
    except _Unknown:
        return None
    return found


def _add_last(found: Readers, parts: nn.Module, place: int) -> None:
    """Add the layer at a place among modules, where the others do not change numbers."""
    for name in parts._modules.keys() - {str(place), "0"}:  # noqa: SLF001  as above
        dropout = found.module(parts, name)
        if type(dropout) is not nn.Dropout or found.value(dropout, "training"):
            raise _Unknown
    found.add(parts, (str(place),))


def _check_attention(found: Readers, attention: Any) -> None:
    """Refuse attention that does more to its input than project it."""
    processor = found.value(attention, "processor")
    changed = any(getattr(attention, name, None) for name in _OTHERS)
    known = type(attention) in _ATTENTION and plain_class(processor).__name__ in _PROCESSORS
    if changed or not known:
        raise _Unknown


def _check_unscaled(found: Readers, attention: Any) -> None:
    """Refuse attention that changes its output other than by a projection."""
    _check_attention(found, attention)
    if found.value(attention, "rescale_output_factor") not in {None, 1}:
        raise _Unknown


def _check_network(found: Readers, network: Any) -> None:
    """Refuse what is no FeedForward of diffusers, or of packed models."""
    del found
    if type(network) not in _NETWORKS:
        raise _Unknown


class CodedNorms:
    """Norms of a block that write codes, and their readers; a copy of the block finds its own."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._found: dict[str, Readers] = {}

    def layers(self, block: nn.Module, norm: str, paths: tuple[str, ...]) -> list[Any]:
        """Return the layers that read a norm's codes in this call; none if 16 bit are needed."""
        if norm not in self.names:
            return []
        compiling = torch.compiler.is_compiling()
        found = None if compiling else self._found.get(norm)
        if found is None or not found.hold():
            found = readers_at(block, paths)
            if found is None:
                return []
            if not compiling:
                self._found[norm] = found
        return found.layers

    def end(self, block: nn.Module, path: str) -> Any:
        """Return the layer of ``end_at`` in this call, or None."""
        found = self._found.get(path)
        if found is None or not found.hold():
            found = end_at(block, path)
            if found is None:
                return None
            self._found[path] = found
        return found.layers[0]

    def __deepcopy__(self, memo: object) -> "CodedNorms":
        return CodedNorms(self.names)

    def __reduce__(self) -> tuple[type["CodedNorms"], tuple[frozenset[str]]]:
        return CodedNorms, (self.names,)
