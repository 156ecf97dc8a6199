"""The tensors of a program: what they are views of, and the calls that make and read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from quantkit.fusion.program import Call, Program, Value, values_in


@dataclass(frozen=True, eq=False)
class Sources:
    """The tensors of a program: what they are views of, and the calls that made them."""

    program: Program

    @cached_property
    def makers(self) -> Mapping[Value, Call]:
        """The call of each result that has memory of its own, to which no call writes."""
        return {
            result: call
            for call in self.program.calls
            if call.fresh and not call.writes
            for result in call.results
            if result is not None and result not in self.program.written
        }

    @cached_property
    def bases(self) -> Mapping[Value, Value]:
        """The tensor that each view is of, in memory of its own."""
        found: dict[Value, Value] = {}
        for call in self.program.calls:
            if not self.is_view(call):
                continue
            source = call.arguments[0]
            for result in call.results:
                if result is not None:
                    found[result] = found.get(source, source)
        return found

    @cached_property
    def read(self) -> frozenset[Value]:
        """Values that a call or the step's caller reads."""
        values = {value for call in self.program.calls for value in call.reads}
        return frozenset(values | {*values_in(self.program.output)})

    @cached_property
    def last_writes(self) -> Mapping[int, int]:
        """The place of the last call that writes to a storage."""
        layouts = self.program.layouts
        return {
            layouts[value].storage: place
            for place, call in enumerate(self.program.calls)
            if call.writes
            for value in call.reads
        }

    @cached_property
    def places(self) -> Mapping[Call, int]:
        """The place of each call in the program."""
        return {call: place for place, call in enumerate(self.program.calls)}

    def is_settled(self, call: Call) -> bool:
        """Tell whether nothing writes later on to what a call reads, nor ever to its results."""
        written, layouts = self.program.written, self.program.layouts
        if call.writes or not written.isdisjoint(call.results):
            return False
        last = (self.last_writes.get(layouts[value].storage, -1) for value in call.reads)
        return all(place < self.places[call] for place in last)

    def is_view(self, call: Call) -> bool:
        """Tell whether results are the first argument's elements, of its type or in pairs."""
        if call.fresh or call.writes or not call.arguments:
            return False
        source, layouts = call.arguments[0], self.program.layouts
        if not isinstance(source, Value) or call.reads != (source,):
            return False
        dtypes = {layouts[r].dtype for r in (source, *call.results) if r is not None}
        return len(dtypes) == 1 or dtypes == {torch.float32, torch.complex64}

    @cached_property
    def readers(self) -> Mapping[Value, Sequence[Call]]:
        """The calls that read a tensor or a view of it."""
        found: dict[Value, list[Call]] = {}
        for call in self.program.calls:
            if not self.is_view(call):
                for value in dict.fromkeys(map(self.base, call.reads)):
                    found.setdefault(value, []).append(call)
        return found

    def base(self, value: Any) -> Any:
        """Return the tensor that an argument is a view of, or what else it is."""
        return self.bases.get(value, value)

    def maker_for(self, value: Any, reader: Call) -> Call | None:
        """Return the call whose very result one call alone reads, not a view of it."""
        maker = self.only_maker(value, reader)
        return maker if maker is not None and value in maker.results else None

    def only_maker(self, value: Any, reader: Call) -> Call | None:
        """Return the call that made what one call alone reads, perhaps through a view.

        None where others read it, too.
        """
        base = self.base(value)
        if base in values_in(self.program.output) or self.readers.get(base) != [reader]:
            return None
        return self.makers.get(base)
