"""Results cached outside of the graph of a step, such as keys and values of cross-attention.

What a layer makes of a prompt is the same at every step of a picture, but a graph cannot compare
its inputs. So a layer may offer a result of one argument and its weights while a step is recorded.
It is computed in a graph of its own, which is launched before the step's graph when the argument is
another tensor, or when it or a weight was written.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from torch import Tensor, nn

from quantkit.pipelines.versions import Version, same_versions, version_of

#: Counts writes to a tensor; the only counter that torch has.
_count = attrgetter("_version")


@dataclass(frozen=True, eq=False)
class _Result:
    """One result, in memory that every launch of the step reads."""

    compute: Callable[[], Tensor]
    #: not in the graphs' own memory, which other recordings of the model write to
    y: Tensor
    version: int
    weights: tuple[Tensor, ...]


class ResultStore(Protocol):
    """A store of layers' results."""

    def result(self, layer: nn.Module, x: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
        """Return what a layer makes of ``x``; None where that is not kept."""


class KeptResults:
    """The results of one recording: offered in a first run of the step, read in later ones."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        """Let results of a recording's own inputs be offered; they count their versions."""
        self._inputs = tuple(inputs)
        self._versions = tuple(map(_count, inputs))
        self._found: dict[tuple[object, ...], _Result] = {}
        self._complete = False
        #: places of the inputs that results depend on
        self._places: set[int] = set()
        #: these inputs, as they were given at the last launch
        self._given: tuple[Version, ...] = ()
        #: of all weights
        self._counts: list[int] = []

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._found)

    def complete(self) -> None:
        """End the first run. Results that it overwrote are computed by every step."""
        self._found = {k: r for k, r in self._found.items() if _count(r.y) == r.version}
        self._complete = True
        self.are_of_weights()

    def result(self, layer: nn.Module, x: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
        """Return what a layer makes of ``x``; None where that is not kept."""
        # A fake one has no address.
        if type(x) is not Tensor:
            return None
        key = (id(layer), x.data_ptr(), x.shape, x.stride(), x.dtype)
        found = self._found.get(key)
        if not self._complete:
            place = self._place(x)
            if place is None:
                return None
            self._places.add(place)
            found = found or self._add(key, layer, compute)
        return None if found is None else found.y

    def _add(
        self, key: tuple[object, ...], layer: nn.Module, compute: Callable[[], Tensor]
    ) -> _Result | None:
        weights = (*layer.parameters(), *layer.buffers())
        if any(t.is_inference() for t in weights):
            return None
        y = compute()
        self._found[key] = _Result(compute, y, _count(y), weights)
        return self._found[key]

    def compute(self) -> None:
        """Compute all of them again."""
        for result in self._found.values():
            result.y.copy_(result.compute())

    def are_of(self, given: Sequence[Tensor]) -> bool:
        """Tell whether they are the results of a step's arguments, and remember these if not."""
        read = [given[place] for place in self._places]
        if self._given and same_versions(self._given, read):
            return True
        self._given = tuple(map(version_of, read))
        return False

    def are_of_weights(self) -> bool:
        """Tell whether no weight was written since the last call."""
        counts = [_count(t) for result in self._found.values() for t in result.weights]
        before, self._counts = self._counts, counts
        return before == counts

    def _place(self, x: Tensor) -> int | None:
        """Return which input ``x`` is, or a view of, as it was given; None where it is none."""
        base = x if x._base is None else x._base  # noqa: SLF001  a view may be another object
        place = next((i for i, t in enumerate(self._inputs) if t is base), None)
        return None if place is None or _count(x) != self._versions[place] else place


_open: ContextVar[ResultStore | None] = ContextVar("quantkit_kept_results", default=None)


@contextmanager
def keeping(results: ResultStore) -> Iterator[None]:
    """Let layers offer their results, and read them, within the body (in this thread)."""
    token = _open.set(results)
    try:
        yield
    finally:
        _open.reset(token)


def kept_result(layer: nn.Module, x: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """Return what a layer makes of ``x`` where a step is recorded that may read it.

    Args:
        layer: whose weights the result depends on, and on nothing else but ``x``.
        x: of a recorded step.
        compute: gives the result, in memory of its own.
    """
    results = _open.get()
    return None if results is None else results.result(layer, x, compute)
