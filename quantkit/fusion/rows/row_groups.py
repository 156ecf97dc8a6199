"""Groups of calls that become row kernels: what such a kernel reads and writes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quantkit.fusion.program import Call, Program, Value, values_in
from quantkit.fusion.rows.grouping import Group, group
from quantkit.fusion.rows.lowering import MUCH_LARGER, Rows
from quantkit.fusion.rows.row_nodes import Node
from quantkit.fusion.rows.schedule import Schedule
from quantkit.fusion.simplify import without_unread


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Several calls that one row kernel replaces."""

    #: places of the calls in the program
    calls: tuple[int, ...]
    rows: Rows
    #: what is written, by the value that reads it
    outputs: Mapping[Value, Node]

    @cached_property
    def reads(self) -> tuple[Value, ...]:
        """Tensors that its outputs need, each once."""
        loads = Schedule(tuple(self.outputs.values())).loads
        return tuple(dict.fromkeys(load.value for load in loads))

    def call_of(self, operator: Any) -> Call:
        """Return the call of an operator that gives its outputs."""
        return Call(operator, self.reads, {}, tuple(self.outputs), writes=False, fresh=True)


def with_row_kernels(program: Program, operator_of: Callable[[RowGroup], Any]) -> Program:
    """Return a program with one call in the place of each group that has rows and spares a call.

    Args:
        program: a simplified one.
        operator_of: an operator on what a group reads, which gives its outputs.
    """
    groups = group(program)
    replaced = {one: one.rows for one in groups if one.rows and _spares(program, one, one.rows)}
    read = _read_outside(program, groups, replaced)
    calls: list[Call] = []
    for one in groups:
        if (rows := replaced.get(one)) is None:
            calls.extend(program.calls[place] for place in one.calls)
            continue
        outputs = {value: node for value, node in rows.nodes.items() if value in read}
        new = RowGroup(one.calls, rows, outputs)
        calls.append(new.call_of(operator_of(new)))
    return without_unread(replace(program, calls=tuple(calls)))


def _spares(program: Program, one: Group, rows: Rows) -> bool:
    """Tell whether a kernel does what several calls do, or one and what made its input."""
    if len(one.calls) > 1:
        return True
    own = program.calls[one.calls[0]].reads
    others = (load.value for load in Schedule(tuple(rows.nodes.values())).loads)
    layouts = program.layouts
    return any(v not in own and MUCH_LARGER * layouts[v].numel > rows.numel for v in others)


def _read_outside(
    program: Program, groups: Iterable[Group], replaced: Mapping[Group, Rows]
) -> frozenset[Value]:
    """Return the values that are read from memory, and those that they are views of."""
    read = {*values_in(program.output)}
    for one in groups:
        if (rows := replaced.get(one)) is not None:
            read |= {load.value for load in Schedule(tuple(rows.nodes.values())).loads}
        else:
            kept = (program.calls[place] for place in one.calls)
            read |= {value for call in kept if not call.is_view for value in call.reads}
    for call in reversed(program.calls):
        if call.is_view and not read.isdisjoint(filter(None, call.results)):
            read |= {*call.reads}
    return frozenset(read)
