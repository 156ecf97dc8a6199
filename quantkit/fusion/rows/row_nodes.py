"""The nodes of a row kernel: loads, maps, reductions of rows, pairs, and codes."""

from dataclasses import dataclass
from enum import Enum

import torch

from quantkit.fusion.program import Value
from quantkit.fusion.rows.access import Access

#: What kernels read and write, as float32 within.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Level(Enum):
    """Numbers that a node has for each row."""

    #: one for each column
    FULL = "full"
    #: one for each two columns
    HALF = "half"
    #: one
    ROW = "row"


class Reduction(Enum):
    """Operations that make one number of a row."""

    SUM = "sum"
    #: largest magnitude
    AMAX = "amax"


@dataclass(frozen=True, eq=False)
class Node:
    """A number, or one for some columns, of each row, in float32."""

    level: Level

    @property
    def arguments(self) -> "tuple[Node, ...]":
        """The nodes that it is computed of."""
        return ()


@dataclass(frozen=True, eq=False)
class Load(Node):
    """Elements of a tensor that lies in memory."""

    value: Value
    access: Access
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Map(Node):
    """An expression of other nodes, number by number."""

    #: in C++, with {0}, {1}, ... for the nodes
    text: str
    of: tuple[Node, ...]

    @property
    def arguments(self) -> tuple[Node, ...]:
        """The nodes of the expression."""
        return self.of


@dataclass(frozen=True, eq=False)
class Reduce(Node):
    """One number of all columns of a row."""

    how: Reduction
    of: Node

    @property
    def arguments(self) -> tuple[Node, ...]:
        """The numbers that are reduced."""
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Second(Node):
    """Every second column."""

    odd: bool
    of: Node

    @property
    def arguments(self) -> tuple[Node, ...]:
        """The node of all columns."""
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Joined(Node):
    """Columns of two nodes in turns."""

    even: Node
    odd: Node

    @property
    def arguments(self) -> tuple[Node, ...]:
        """The node of even columns, and that of odd ones."""
        return (self.even, self.odd)


@dataclass(frozen=True)
class Piece:
    """Columns of a concatenation."""

    #: of loads and maps, whose places are those of the piece by itself
    node: Node
    first: int
    columns: int


@dataclass(frozen=True, eq=False)
class Concatenated(Node):
    """Rows of several tensors, joined at their ends."""

    pieces: tuple[Piece, ...]

    @property
    def columns(self) -> int:
        """Columns of a whole row."""
        return sum(piece.columns for piece in self.pieces)


@dataclass(frozen=True, eq=False)
class Codes(Node):
    """Codes of numbers over a scale; nothing is computed of them."""

    of: Node
    scale: Node
    #: of FORMATS
    format_name: str

    @property
    def arguments(self) -> tuple[Node, ...]:
        """Numbers and scale."""
        return (self.of, self.scale)
