"""Groups of layers that read the same input in every call, as queries, keys and values do."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from quantkit.calibration.observing.shared_input import Remembered


class UnsharedInputError(Exception):
    """Layers that read the same input in their first call do not in another."""


@dataclass(frozen=True, eq=False)
class _Read:
    input: Remembered
    leader: str


class SharedInputs:
    """Groups of layers, by the first of each, its leader: found in their first call, then kept."""

    def __init__(self) -> None:
        #: layer -> leader, and leader -> layers
        self._leaders: dict[str, str] = {}
        self._groups: dict[str, set[str]] = {}
        #: in this call, by address and kind of layer
        self._reads: dict[tuple[int, Hashable], _Read] = {}
        self._called: dict[str, set[str]] = {}
        self._new: set[str] = set()

    def leader_of(self, layer: str) -> str:
        """Return the first of the layers that read what this one does."""
        return self._leaders.get(layer, layer)

    def is_looked_at(self, layer: str, module: nn.Module, values: Tensor) -> bool:
        """Tell whether another layer of its group was called with an input in this call.

        Raises:
            UnsharedInputError: its group was called with another one.
        """
        place = (values.data_ptr(), _kind(module))
        before = self._reads.get(place)
        if before is not None and not before.input.is_still(values):
            before = None
        if layer not in self._leaders:
            joins = before is not None and before.leader in self._new
            self._join(layer, before.leader if before is not None and joins else layer)
        leader = self._leaders[layer]
        called = self._called.setdefault(leader, set())
        again = bool(called) and len(self._groups[leader]) > 1
        if again and (before is None or before.leader != leader or layer in called):
            raise UnsharedInputError(layer)
        called.add(layer)
        if not again:
            self._reads[place] = _Read(Remembered(values), leader)
        return again

    def end_call(self) -> None:
        """Say that a call of the model is over.

        Raises:
            UnsharedInputError: some layers of a group were called, and others not.
        """
        called = self._called
        self._reads, self._called, self._new = {}, {}, set()
        for leader, layers in called.items():
            if layers != self._groups[leader]:
                raise UnsharedInputError(leader)

    def _join(self, layer: str, leader: str) -> None:
        self._leaders[layer] = leader
        self._groups.setdefault(leader, set()).add(layer)
        if leader == layer:
            self._new.add(layer)


def _kind(module: nn.Module) -> Hashable:
    """Return what decides which rows a layer makes of an input."""
    if not isinstance(module, nn.Conv2d):
        return None
    sides = (module.kernel_size, module.stride, module.padding, module.dilation)
    return (*sides, module.padding_mode, module.groups)
