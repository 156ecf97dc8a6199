"""A step of a model as a list of operator calls, run without the model's Python."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Value:
    """A tensor of a program, by its number."""

    number: int


@dataclass(frozen=True)
class Layout:
    """The elements of a tensor in memory."""

    shape: tuple[int, ...]
    #: in elements
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    #: of the first element in its storage; a copy has the layout of its source all the same
    offset: int = field(default=0, compare=False)
    #: a number for its storage, which views share
    storage: int = field(default=-1, compare=False)

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operator."""

    #: an overload, as aten.add.Tensor
    operator: Any
    #: with a ``Value`` for each tensor, also within lists
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    #: of each tensor that it returns; None for other results
    results: tuple[Value | None, ...]
    #: it writes to a tensor that it is given
    writes: bool
    #: its results have memory of their own
    fresh: bool

    @property
    def name(self) -> str:
        """As aten.add.Tensor."""
        return str(self.operator)

    @property
    def is_view(self) -> bool:
        """True when its results lie in memory that it is given."""
        return not self.fresh and not self.writes

    @property
    def result(self) -> Value:
        """Its only result."""
        (result,) = self.results
        assert result is not None
        return result

    @cached_property
    def reads(self) -> tuple[Value, ...]:
        """Its tensors, each as often as it is given."""
        return tuple(given_values((*self.arguments, *self.keywords.values())))

    def make(self, tensors: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        """Call the operator on the tensors of its values, and return those of its results."""

        def fill(argument: Any) -> Any:
            return replaced(argument, tensors.__getitem__)

        keywords = {name: fill(argument) for name, argument in self.keywords.items()}
        answer = self.operator(*map(fill, self.arguments), **keywords)
        answers = [answer] if isinstance(answer, Tensor) else pytree.tree_leaves(answer)
        found = zip(self.results, answers, strict=True)
        return {value: tensor for value, tensor in found if value is not None}


@dataclass(frozen=True, eq=False)
class Program:
    """A step: calls in order, on its inputs and on tensors that the model has."""

    calls: tuple[Call, ...]
    inputs: tuple[Value, ...]
    #: weights and buffers, which are read where they lie, and results that never change
    constants: Mapping[Value, Tensor]
    #: as the step returned it, with a ``Value`` for each tensor
    output: Any
    #: values whose memory some call writes to
    written: frozenset[Value] = frozenset()
    #: constants that Python made of numbers in the step
    literals: frozenset[Value] = frozenset()
    layouts: Mapping[Value, Layout] = field(default_factory=dict, repr=False)

    @cached_property
    def _last(self) -> Mapping[int, tuple[Value, ...]]:
        """Values that are used for the last time, by the place of the call."""
        return self.last_uses([(call,) for call in self.calls])

    def __str__(self) -> str:
        """Return a line for each call."""
        return "\n".join(
            f"{', '.join(f'%{r.number}' if r else '_' for r in call.results)} = {call.name}"
            f"({', '.join(map(_told, call.arguments))})"
            for call in self.calls
        )

    def last_uses(self, calls: Iterable[Iterable[Call]]) -> dict[int, tuple[Value, ...]]:
        """Return the values that nothing uses any more, by place.

        Args:
            calls: those of each place, which read and give values of the program.
        """
        last: dict[Value, int] = {}
        for place, here in enumerate(calls):
            for call in here:
                last |= dict.fromkeys((*call.reads, *filter(None, call.results)), place)
        kept = {*self.constants, *self.inputs, *values_in(self.output)}
        found: dict[int, tuple[Value, ...]] = {}
        for value, place in last.items():
            if value not in kept:
                found[place] = (*found.get(place, ()), value)
        return found

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Return what the step returns.

        Args:
            inputs: tensors of the shapes, strides and dtypes that it was recorded with.
        """
        tensors = {**self.constants, **dict(zip(self.inputs, inputs, strict=True))}
        for place, call in enumerate(self.calls):
            tensors |= call.make(tensors)
            for value in self._last.get(place, ()):
                del tensors[value]
        return pytree.tree_map_only(Value, tensors.__getitem__, self.output)


def values_in(tree: Any) -> tuple[Value, ...]:
    """Return the values of an output."""
    return tuple(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Value))


def given_values(arguments: Iterable[Any]) -> Iterator[Value]:
    """Yield the values of a call's arguments, also within lists."""
    for argument in arguments:
        if isinstance(argument, Value):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from given_values(argument)


def replaced(argument: Any, change: Callable[[Any], Any], kind: type = Value) -> Any:
    """Return an argument of a call with its values, or tensors, changed, also within lists."""
    if isinstance(argument, kind):
        return change(argument)
    if isinstance(argument, (list, tuple)):
        return type(argument)(replaced(one, change, kind) for one in argument)
    return argument


def _told(argument: Any) -> str:
    return str(replaced(argument, lambda value: f"%{value.number}"))
