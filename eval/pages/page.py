"""A page as a value: its verdict, tiles and sections, whatever it is about and renders it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from quantkit.eval.measuring.embedding import Store
from quantkit.eval.measuring.pairs import Pair, SortKey
from quantkit.eval.pages.network_map import NetworkMap

_NO_PICTURES = Store()


@dataclass(frozen=True)
class Tile:
    """One fact in large letters, with what it takes to read it."""

    title: str
    value: str
    notes: tuple[str, ...] = ()
    #: folder of a report that the title leads to; empty: none
    folder: str = ""
    #: what that report's gates show, as a style and in words
    state: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    #: after the text, in a soft colour and a line of its own
    soft: str = ""
    #: after both, in a line of its own
    below: str = ""
    #: code, name, words (no number in a column of them), good or bad
    style: str = ""
    #: folder of a report that the text leads to
    folder: str = ""
    #: what a column is sorted by; None: the text
    value: int | None = None
    #: background, from 0 to 100; None: none
    heat: int | None = None
    #: columns that it takes
    span: int = 1


#: Texts are cells that are nothing more.
Row = tuple[Cell | str, ...]


@dataclass(frozen=True)
class Table:
    """Rows below titles."""

    kind: ClassVar[str] = "table"

    label: str
    #: none: the first cell of a row is its title
    titles: tuple[str, ...]
    rows: tuple[Row, ...]
    #: columns that are set to the right
    numbers: Collection[int] = ()
    #: rows apart from the others
    last_rows: tuple[Row, ...] = ()
    style: str = "wide"
    #: readers sort and search it under this id; empty: they do not
    sorted_as: str = ""

    @property
    def bodies(self) -> tuple[tuple[tuple[Cell, ...], ...], ...]:
        """The cells of rows, and of the last ones."""
        groups = (self.rows, *([self.last_rows] if self.last_rows else []))
        return tuple(tuple(map(_cells, rows)) for rows in groups)

    def is_number(self, index: int, cell: Cell) -> bool:
        """Return whether a cell is set to the right, in a column."""
        return (index in self.numbers or cell.heat is not None) and cell.style != "words"


def _cells(row: Row) -> tuple[Cell, ...]:
    return tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row)


@dataclass(frozen=True)
class Text:
    """A paragraph; what stands between backquotes is code."""

    kind: ClassVar[str] = "text"

    text: str
    #: soft or warning; empty: plain
    style: str = ""


@dataclass(frozen=True)
class Heading:
    """The title of what follows in a section."""

    kind: ClassVar[str] = "heading"

    title: str
    soft: str = ""


@dataclass(frozen=True)
class Plot:
    """A drawing."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Plots:
    """Drawings beside each other."""

    kind: ClassVar[str] = "plots"

    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Gallery:
    """Pairs of pictures, which readers sort and filter."""

    kind: ClassVar[str] = "gallery"

    pairs: tuple[Pair, ...]
    sort_keys: tuple[SortKey, ...]
    #: one pair a line: it has many pictures
    wide: bool = False
    #: pictures of a pair are those of one training
    course: bool = False
    #: what the pictures are that open, where readers may ask
    note: str = ""


@dataclass(frozen=True)
class Figures:
    """Pictures that have no pair yet, each the only side of one."""

    kind: ClassVar[str] = "figures"

    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Commands:
    """Lines that a reader types."""

    kind: ClassVar[str] = "commands"

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Card:
    """The verdict of another report."""

    kind: ClassVar[str] = "card"

    title: str
    folder: str
    #: of its gates, as a style
    state: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class NetworkDrawing:
    """The map of a network, drawn by the browser."""

    kind: ClassVar[str] = "map"

    network: NetworkMap
    #: name of the layer with the largest error; empty: nothing was measured
    worst: str


@dataclass(frozen=True)
class Section:
    """A part of a page, or of another section, that opens and closes."""

    kind: ClassVar[str] = "section"

    id: str
    title: str
    parts: tuple["Part", ...]
    #: beside the title
    digest: str = ""
    #: among the contents; empty: the title
    link: str = ""
    open: bool = False


Part = (
    Table | Text | Heading | Plots | Gallery | Figures | Commands | Card | NetworkDrawing | Section
)


@dataclass(frozen=True)
class Running:
    """The note on a job that is not over, or ended early."""

    note: str
    #: when the page was written, in milliseconds since 1970
    written: int
    #: seconds after which it loads itself again; None: it does not change any more
    reload: float | None


@dataclass(frozen=True)
class Page:
    """All that stands on a page."""

    #: of the window
    title: str
    heading: str
    lead: str
    #: of the gates, as a style; empty: the page has no verdict of its own
    state: str
    sections: tuple[Section, ...]
    #: beside the lead
    facts: str = ""
    tiles: tuple[Tile, ...] = ()
    warnings: tuple[str, ...] = ()
    #: pairs to look at first, by their heading
    groups: tuple[tuple[str, tuple[Pair, ...]], ...] = ()
    #: they have many pictures
    wide: bool = False
    #: sides that readers pick
    picks: tuple[str, ...] = ()
    #: measured pictures that it holds
    store: Store = _NO_PICTURES
    running: Running | None = None
    #: it is in a folder of an index, to which it leads
    indexed: bool = False


def state_style(state: str) -> str:
    """Return the style of what gates show."""
    return state.replace(" ", "-")
