"""The order in which a row kernel computes its nodes: passes over a row between reductions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from quantkit.fusion.rows.row_nodes import Concatenated, Level, Load, Node, Reduce


@dataclass(frozen=True, eq=False)
class Schedule:
    """The passes in which nodes are computed.

    Pass 0 needs no reduction, pass n one of pass n - 1. A node is computed as late as its readers
    allow, so that it takes registers for as short as can be.
    """

    #: what is written to memory
    sinks: tuple[Node, ...]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, each after those that it reads."""
        found: dict[Node, None] = {}

        def visit(node: Node) -> None:
            if node not in found:
                for argument in node.arguments:
                    visit(argument)
                found[node] = None

        for sink in self.sinks:
            visit(sink)
        return tuple(found)

    @cached_property
    def everything(self) -> tuple[Node, ...]:
        """All nodes, and those of pieces of rows."""
        joined = (node for node in self.nodes if isinstance(node, Concatenated))
        pieces = (Schedule((piece.node,)).nodes for node in joined for piece in node.pieces)
        return tuple(dict.fromkeys((*self.nodes, *chain.from_iterable(pieces))))

    @property
    def loads(self) -> tuple[Load, ...]:
        """Nodes that are read from memory."""
        return tuple(node for node in self.everything if isinstance(node, Load))

    @cached_property
    def _earliest(self) -> Mapping[Node, int]:
        found: dict[Node, int] = {}
        for node in self.nodes:
            first = max((found[argument] for argument in node.arguments), default=0)
            found[node] = first + isinstance(node, Reduce)
        return found

    @cached_property
    def _passes(self) -> Mapping[Node, int]:
        found = {node: self._earliest[node] for node in self.sinks}
        for node in reversed(self.nodes):
            mine = self._earliest[node] if node.level is Level.ROW else found[node]
            found[node] = mine
            for argument in node.arguments:
                # What is reduced is read a pass before its reduction is known.
                read = mine - isinstance(node, Reduce)
                found[argument] = min(found.get(argument, read), read)
        return found

    @property
    def passes(self) -> range:
        """Numbers of the passes."""
        return range(max(self._passes.values(), default=0) + 1)

    def of_rows(self, number: int) -> Sequence[Node]:
        """Return nodes with a number for each row that are known before a pass."""
        return self._in(number, (n for n in self.nodes if n.level is Level.ROW))

    def of_columns(self, number: int) -> Sequence[Node]:
        """Return nodes with numbers for columns that are computed in a pass."""
        return self._in(number, (n for n in self.nodes if n.level is not Level.ROW))

    def reductions(self, number: int) -> Sequence[Reduce]:
        """Return what is reduced in a pass, and known after it."""
        return [
            node
            for node in self.nodes
            if isinstance(node, Reduce) and self._passes[node] == number + 1
        ]

    @cached_property
    def held(self) -> frozenset[Node]:
        """Nodes of columns that a later pass reads."""
        found = set()
        for node in self.nodes:
            read = self._passes[node] - isinstance(node, Reduce)
            found |= {
                a for a in node.arguments if a.level is not Level.ROW and self._passes[a] < read
            }
        return frozenset(found)

    def _in(self, number: int, nodes: Iterable[Node]) -> Sequence[Node]:
        return [node for node in nodes if self._passes[node] == number]
