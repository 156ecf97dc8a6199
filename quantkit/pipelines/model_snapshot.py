"""Snapshots that tell whether a model has changed since its step was recorded."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Attributes that are no modules and have settings of their own: attention processors of diffusers.
_PROCESSOR = "processor"
#: A tuple is what it was for as long as it is the same one.
_CONTAINERS = (dict, list, set)


class Snapshot:
    """The state that a recorded step depends on: attributes, hooks, adapters, addresses of tensors.

    Attributes are compared by identity, those of every module one by one, and what dicts and lists
    hold with them. What a module keeps deeper than that is not looked at. What was replaced is kept
    alive, so that a launch finds the memory that it reads.
    """

    def __init__(self, model: nn.Module) -> None:
        namespaces: list[dict[str, Any]] = [vars(owner) for owner in _owners(model)]
        held = [v for v in _values(namespaces) if isinstance(v, _CONTAINERS)]
        # Most are the tables of a module's hooks.
        self._empty = [v for v in held if not v]
        self._dicts = [*namespaces, *(v for v in held if isinstance(v, dict) and v)]
        self._others = [v for v in held if not isinstance(v, dict) and v]
        self._sizes = self._measure()
        seen = self._look()
        # Not the array: Python's collector does not look into one, and the model holds this.
        self._values, self._identities = seen.tolist(), seen.tobytes()
        self._tensors = [*model.parameters(), *model.buffers()]
        self._released = _released(self._tensors[0].device)
        self._addresses = _addresses(self._tensors)

    def holds(self) -> bool:
        """Tell whether nothing was replaced, moved, added or taken away since."""
        return self.is_in_place() and self.has_all()

    def is_readable(self) -> bool:
        """Tell whether the memory that the model's tensors had is still mapped.

        Memory that torch gave back to the driver may have been theirs; reading it would end the
        process' work on the device. Where none was given back, nothing else is looked at.
        """
        released = _released(self._tensors[0].device)
        if released is not None and released == self._released:
            return True
        if not self.is_in_place():
            return False
        self._released = released
        return True

    def is_in_place(self) -> bool:
        """Tell whether the model's tensors have the same addresses."""
        return _addresses(self._tensors) == self._addresses

    def has_all(self) -> bool:
        """Tell whether nothing was replaced, added or taken away since."""
        if any(self._empty) or self._measure() != self._sizes:
            return False
        # 60,000 values of SDXL: comparing their addresses at once takes a twentieth of ``is``.
        return self._look().tobytes() == self._identities

    def _measure(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._others)]

    def _look(self) -> "np.ndarray[Any, np.dtype[np.object_]]":
        values = chain(
            chain.from_iterable(map(dict.values, self._dicts)), chain.from_iterable(self._others)
        )
        return np.fromiter(values, dtype=object, count=sum(self._sizes))


def _values(tables: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, tables))


def _owners(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module
        processor = getattr(module, _PROCESSOR, None)
        if hasattr(processor, "__dict__") and not isinstance(processor, nn.Module):
            yield processor


def _addresses(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _released(device: torch.device) -> int | None:
    """Return how many bytes torch gave back to the driver of a GPU; None: it does not count."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    found: int = torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["freed"]
    return found
