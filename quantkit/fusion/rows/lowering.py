"""From calls of operators to the nodes of one row kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from quantkit.fusion.program import Call, Layout, Value
from quantkit.fusion.rows.access import (
    Access,
    Dim,
    access_of,
    broadcast,
    is_every_second,
    is_identity,
    is_of_rows,
    merged,
)
from quantkit.fusion.rows.expressions import CHEAP, expression_of, is_expression
from quantkit.fusion.rows.row_nodes import FLOATS, Level, Load, Map, Node, Second
from quantkit.fusion.sources import Sources

#: A call is computed again for each element of a result at least so many times as large.
MUCH_LARGER = 8
#: Columns of a row: fewer are no row, and more do not fit the registers of a block.
_FEWEST, _MOST = 8, 16384


class NotARowError(Exception):
    """A call that no row kernel computes, or not this one."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The nodes of a row kernel: what they are of, and how many numbers they have."""

    sources: Sources
    #: places of full nodes
    numel: int
    #: places of a row; None: nothing is reduced
    columns: int | None = None
    nodes: Mapping[Value, Node] = field(default_factory=dict)
    #: of what lies in memory, each once
    loads: dict[tuple[Value, Access, Level], Load] = field(default_factory=dict)

    def layout(self, value: Value) -> Layout:
        """Return the layout of a value."""
        return self.sources.program.layouts[value]

    def with_columns(self, columns: int) -> "Rows":
        """Return the same with rows of so many columns.

        Raises:
            NotARowError: they have others, or these are none for a block.
        """
        fits = _FEWEST <= columns <= _MOST and self.numel % columns == 0
        if not fits or self.columns not in {None, columns}:
            raise NotARowError
        return replace(self, columns=columns)

    def level_of(self, layout: Layout) -> Level:
        """Return the level of a result.

        Raises:
            NotARowError: it is no result of such rows.
        """
        numel = layout.numel * (2 if layout.dtype is torch.complex64 else 1)
        if numel == self.numel:
            return Level.FULL
        if self.columns is not None and numel * self.columns == self.numel:
            return Level.ROW
        if numel * 2 == self.numel:
            return Level.HALF
        raise NotARowError

    def argument(self, value: Value, result: Layout, level: Level) -> Node:
        """Return the node that an elementwise operator reads.

        Args:
            value: the operator's argument.
            result: of the operator.
            level: of the result.

        Raises:
            NotARowError: it is no number, or is computed in this kernel at another place.
        """
        layout = self.layout(value)
        access = self._access(layout, result)
        node = self.nodes.get(self.sources.bases.get(value, value))
        if node is None:
            return self._maker_of(value, result, level) or self._load(value, access, level)
        if node.level is level and is_identity(access) and not layout.offset:
            return node
        if node.level is Level.ROW and not layout.offset and self._is_of_rows(access, level):
            return node
        halves = level is Level.HALF and node.level is Level.FULL and is_every_second(access)
        if halves and layout.offset in {0, 1}:
            return Second(Level.HALF, odd=layout.offset == 1, of=node)
        full = node.level is level is Level.FULL
        if not full or (elsewhere := self._elsewhere(value, layout, result)) is None:
            raise NotARowError
        return elsewhere

    def _elsewhere(self, value: Value, seen: Layout, result: Layout) -> Node | None:
        """Return what elementwise calls of one tensor give, at the places of a view of it.

        None where that is read of memory more cheaply, or is computed in this kernel.
        """
        base = self.sources.base(value)
        made, maker = self.layout(base), self.sources.makers.get(base)
        if maker is None or len(maker.reads) != 1 or not is_expression(maker):
            return None
        (of,) = maker.reads
        whole = self.layout(of)
        smaller = whole.dtype.itemsize <= made.dtype.itemsize
        if whole != replace(made, dtype=whole.dtype) or seen.offset != made.offset or not smaller:
            return None
        same = replace(seen, dtype=whole.dtype, offset=whole.offset)
        node = self._elsewhere(of, same, result)
        if node is None:
            if self.sources.base(of) in self.nodes or of in self.sources.program.written:
                return None
            node = self._load(of, self._access(same, result), Level.FULL)
        return Map(Level.FULL, expression_of(maker), (node,))

    def _is_of_rows(self, access: Access, level: Level) -> bool:
        if self.columns is None or level is Level.ROW:
            return False
        halves = level is Level.HALF
        return is_of_rows(access, self.columns // 2 if halves else self.columns)

    def _access(self, layout: Layout, result: Layout) -> Access:
        access = access_of(layout, result)
        if access is None or layout.device != result.device:
            raise NotARowError
        return access

    def _load(self, value: Value, access: Access, level: Level) -> Load:
        dtype = self.layout(value).dtype
        if dtype is torch.complex64:
            pairs = [Dim(dim.size, 2 * dim.stride) for dim in access]
            access, dtype = merged([*pairs, Dim(2, 1)]), torch.float32
        if dtype not in FLOATS:
            raise NotARowError
        key = (value, access, level)
        return self.loads.setdefault(key, Load(level, value, access, dtype))

    def _maker_of(self, value: Value, result: Layout, level: Level) -> Node | None:
        """Return the node of a call so small that it is made again; None: it is read."""
        maker = self.sources.makers.get(value)
        small = self.layout(value).numel * MUCH_LARGER <= result.numel
        cheap = maker is not None and maker.operator in CHEAP and small
        return self._again(maker, self.layout(value), result, level) if cheap else None

    def _again(self, maker: Call | None, made: Layout, result: Layout, level: Level) -> Node | None:
        """Return the node of an elementwise call for a larger result; None: it cannot be one."""
        if maker is None or not is_expression(maker):
            return None
        nodes = [self._made_again(value, made, result, level) for value in maker.reads]
        found = tuple(node for node in nodes if node is not None)
        return Map(level, expression_of(maker), found) if len(found) == len(nodes) else None

    def piece(self, value: Value) -> Node:
        """Return the node of a tensor that is a part of each row, at places of its own.

        Raises:
            NotARowError: it is no number, or computed in this kernel.
        """
        whole = _dense(self.layout(value))
        maker = self.sources.makers.get(value)
        node = self._again(maker, self.layout(value), whole, Level.FULL)
        node = node or self._elsewhere(value, self.layout(value), whole)
        if node is not None:
            return node
        if self.sources.bases.get(value, value) in self.nodes:
            raise NotARowError
        return self._load(value, self._access(self.layout(value), whole), Level.FULL)

    def _made_again(self, value: Value, made: Layout, result: Layout, level: Level) -> Node | None:
        """Return what a small call reads, as the elements of a larger result; None: it cannot."""
        computed = self.sources.bases.get(value, value) in self.nodes
        if computed or value in self.sources.program.written:
            return None
        strides = broadcast(self.layout(value), made.shape)
        if strides is None:
            return None
        wide = replace(self.layout(value), shape=made.shape, strides=strides)
        return self._load(value, self._access(wide, result), level)


def _dense(layout: Layout) -> Layout:
    """Return the layout of the same elements, row by row without gaps."""
    strides, apart = [], 1
    for size in reversed(layout.shape):
        strides.append(apart)
        apart *= size
    return replace(layout, strides=tuple(reversed(strides)), offset=0)
