"""Whether a model is still what it was: a recorded step reads addresses, and asks no module."""

from collections.abc import Iterator
from itertools import chain
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
        self._namespaces: list[dict[str, Any]] = [vars(owner) for owner in _owners(model)]
        held = [v for v in _values(self._namespaces) if isinstance(v, _CONTAINERS)]
        self._held = held
        # Most are the empty tables of a module's hooks.
        self._dicts = [v for v in held if isinstance(v, dict) and v]
        self._others = [v for v in held if not isinstance(v, dict) and v]
        self._seen = self._look()
        self._tensors = [*model.parameters(), *model.buffers()]
        self._addresses = _addresses(self._tensors)

    def holds(self) -> bool:
        """Tell whether nothing was replaced, moved, added or taken away since."""
        (sizes, values), (old_sizes, old_values) = self._look(), self._seen
        # Every step asks this of 30,000 values: map and is_ take a tenth of a loop's time.
        same = sizes == old_sizes and all(map(is_, values, old_values))
        return same and _addresses(self._tensors) == self._addresses

    def _look(self) -> tuple[list[int], list[Any]]:
        """Return how much everything holds, and what."""
        sizes = [*map(len, self._namespaces), *map(len, self._held)]
        values = _values(self._namespaces)
        values += _values(self._dicts)
        values += chain.from_iterable(self._others)
        return sizes, values


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _owners(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module
        processor = getattr(module, _PROCESSOR, None)
        if hasattr(processor, "__dict__") and not isinstance(processor, nn.Module):
            yield processor


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
