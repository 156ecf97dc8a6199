"""Pages as Markdown, with other people's text made harmless."""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch
from urllib.parse import quote

from quantkit.eval.measuring.pairs import Pair, Side
from quantkit.eval.pages.page import (
    Card,
    Cell,
    Commands,
    Gallery,
    Heading,
    Page,
    Part,
    Section,
    Table,
    Text,
    Tile,
)

#: More pairs than this are not shown: it would be a page of pictures.
MOST_PAIRS = 24


def to_markdown(page: Page) -> str:
    """Return a page without its plots, and with its worst pairs alone."""
    facts = f" {escape_markdown(page.facts)}" if page.facts else ""
    blocks = [
        f"# {escape_markdown(page.heading)}",
        f"**{escape_markdown(page.lead)}**{facts}",
        *(f"> Note: {escape_markdown(line)}" for line in page.warnings),
        "\n".join(_tile(tile) for tile in page.tiles if not tile.folder),
        *(block for section in page.sections for block in _section(section)),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _tile(tile: Tile) -> str:
    notes = f" ({', '.join(tile.notes)})" if tile.notes else ""
    return f"- {escape_markdown(f'{tile.title}: {tile.value}{notes}')}"


def _section(section: Section) -> Iterator[str]:
    yield f"## {escape_markdown(section.title)}"
    yield from map(_show, section.parts)


def _heading(title: str, soft: str) -> str:
    return f"### {escape_markdown(f'{title}, {soft}' if soft else title)}"


def _text(text: str) -> str:
    """Return our own text, what stands between backquotes as code."""
    return "".join(
        code_span(words) if index % 2 else escape_markdown(words, strip=False)
        for index, words in enumerate(text.split("`"))
    )


@singledispatch
def _show(_: Part) -> str:
    return ""


@_show.register
def _(part: Text) -> str:
    return f"{'> Note: ' if part.style == 'warning' else ''}{_text(part.text)}"


@_show.register
def _(part: Heading) -> str:
    return _heading(part.title, part.soft)


@_show.register
def _(part: Section) -> str:
    return "\n\n".join([_heading(part.title, part.digest), *map(_show, part.parts)])


@_show.register
def _(part: Table) -> str:
    titles = [escape_markdown(title) for title in part.titles] or ["", ""]
    return _table(titles, (_row(part, row) for rows in part.bodies for row in rows))


def _row(table: Table, row: Sequence[Cell]) -> list[str]:
    found: list[str] = []
    for cell in row:
        found += _cells(cell, number=table.is_number(len(found), cell))
    return found


@_show.register
def _(part: Gallery) -> str:
    pairs = part.pairs[:MOST_PAIRS]
    titles = ("picture", "seed", "prompt", "measured", *(side.label for side in pairs[0].sides))
    return _table([escape_markdown(title) for title in titles], map(_pair, pairs))


@_show.register
def _(part: Commands) -> str:
    return "\n".join(["```", *(" ".join(line.split()) for line in part.lines), "```"])


@_show.register
def _(part: Card) -> str:
    return f"**{escape_markdown(part.title)}**: {escape_markdown(' '.join(part.texts))}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(cell: Cell, *, number: bool) -> list[str]:
    text = cell.text if number else escape_markdown(cell.text or "-")
    text = code_span(cell.text) if cell.style == "code" else text
    if cell.folder:
        text = f"[{text}]({quote(cell.folder)}/report.md)"
    more = [_text(words) for words in (cell.soft, cell.below) if words]
    return [", ".join([text, *more]), *["-"] * (cell.span - 1)]


def _pair(pair: Pair) -> list[str]:
    seed = "-" if pair.seed is None else str(pair.seed)
    told = (pair.name, seed, pair.prompt, pair.numbers)
    return [*map(escape_markdown, told), *(_picture(pair, side) for side in pair.sides)]


def _picture(pair: Pair, side: Side) -> str:
    inside = side.src.startswith("data:")
    file = f"images/{side.label}/{quote(pair.name)}.png" if inside else side.src
    return f"![{escape_markdown(side.label)}]({file})"


#: What Markdown, its tables and GitHub's links of bare addresses read as more than a letter.
_MARKS = re.compile(r"[\\`*_{}\[\]|~$@]|:(?=//)|(?<=\bwww)\.")


def escape_markdown(text: object, *, strip: bool = True) -> str:
    """Return somebody else's text for one line of Markdown, which shows it as it is.

    Args:
        text: of any characters.
        strip: spaces around it go.
    """
    plain = re.sub(r"\s+", " ", str(text))
    plain = plain.strip() if strip else plain
    return _MARKS.sub(r"\\\g<0>", html.escape(plain, quote=False))


def code_span(text: object) -> str:
    """Return somebody else's text between as many backquotes as it takes, for one line."""
    plain = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{space}{plain}{space}{fence}"
