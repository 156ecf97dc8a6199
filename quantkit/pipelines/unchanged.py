"""Whether a model is still what it was: a recorded step reads addresses, and asks no module."""

from collections.abc import Iterator
from operator import is_
from typing import Any

from torch import Tensor, nn

#: Attributes that are no modules and have settings of their own: attention processors of diffusers.
_PROCESSOR = "processor"
_CONTAINERS = (dict, list, set, tuple)


class Snapshot:
    """What a model's step depends on: its attributes, hooks, adapters, and where its tensors lie.

    Attributes are compared by identity, those of every module one by one, and what dicts and lists
    hold with them. What a module keeps deeper than that is not looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = tuple(_Part(owner) for owner in _owners(model))
        self._tensors = tuple(_tensors(model))
        self._addresses = _addresses(self._tensors)

    def holds(self) -> bool:
        """Tell whether nothing was replaced, moved, added or taken away since."""
        same = all(part.holds() for part in self._parts)
        return same and _addresses(self._tensors) == self._addresses


class _Part:
    """The attributes of one object."""

    __slots__ = ("_attributes", "_contents", "_filled", "_held", "_values")

    def __init__(self, owner: Any) -> None:
        self._attributes: dict[str, Any] = vars(owner)
        self._values = tuple(self._attributes.values())
        self._held = tuple(v for v in self._values if isinstance(v, _CONTAINERS))
        # Most of a module's containers are its empty tables of hooks.
        self._filled = tuple(held for held in self._held if held)
        self._contents = tuple(_contents(held) for held in self._filled)

    def holds(self) -> bool:
        attributes = self._attributes
        if len(attributes) != len(self._values):
            return False
        if not all(map(is_, attributes.values(), self._values)):
            return False
        if sum(map(bool, self._held)) != len(self._filled):
            return False
        return all(map(_holds, self._filled, self._contents))


def _holds(held: Any, contents: tuple[Any, ...]) -> bool:
    return len(held) == len(contents) and all(map(is_, _values(held), contents))


def _contents(held: Any) -> tuple[Any, ...]:
    return tuple(_values(held))


def _values(held: Any) -> Any:
    return held.values() if isinstance(held, dict) else held


def _owners(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module
        processor = getattr(module, _PROCESSOR, None)
        if hasattr(processor, "__dict__") and not isinstance(processor, nn.Module):
            yield processor


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _addresses(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])
