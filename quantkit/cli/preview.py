"""Two pictures side by side on a terminal, as half blocks: two pixels a letter, in colour.

No protocol of one terminal (kitty, iTerm2, sixel): half blocks are plain letters, so they survive
ssh, tmux and a log.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.cli.console import say, terminal

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.text import Text

    from quantkit.eval.pages.live import SoFar

#: Columns of one picture, at most: two of them fit 80 columns with their gap.
MOST_COLUMNS = 38
GAP = 2
_UPPER_HALF = "\u2580"


def print_pair(title: str, first: Path, second: Path) -> None:
    """Print two picture files side by side; nothing where no terminal shows colours."""
    console = terminal()
    if console is None:
        return
    from PIL import Image

    columns = min(MOST_COLUMNS, (console.width - GAP) // 2)
    if columns < 1:
        return
    with Image.open(first) as left, Image.open(second) as right:
        rows = zip(half_blocks(left, columns), half_blocks(right, columns), strict=True)
        console.print(title, highlight=False, soft_wrap=True)
        for one, other in rows:
            console.print(one.append(" " * GAP).append_text(other), soft_wrap=True)


def print_so_far(found: "SoFar", *, pictures: bool) -> None:
    """Show the worst pair of an evaluation that runs, when it is another one than before.

    Args:
        found: how far it is.
        pictures: show them where a terminal can; elsewhere the line stands alone, on stderr.
    """
    if not found.new:
        return
    if pictures and terminal() is not None:
        print_pair(found.words, found.original, found.packed)
    else:
        say(found.words)


def half_blocks(image: "Image", columns: int) -> "list[Text]":
    """Return a picture as lines of half blocks; a letter is a column wide and two pixels high.

    Args:
        image: any mode and size.
        columns: width in letters; the height follows, and an odd last row has black below it.
    """
    import numpy as np
    from PIL.Image import Resampling
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    height = max(1, round(columns * image.height / image.width))
    small = np.asarray(image.convert("RGB").resize((columns, height), Resampling.BOX))
    padded = np.pad(small, ((0, height % 2), (0, 0), (0, 0)))
    lines = []
    for upper, lower in zip(padded[0::2], padded[1::2], strict=True):
        line = Text()
        for top, bottom in zip(upper, lower, strict=True):
            style = Style(color=Color.from_rgb(*top), bgcolor=Color.from_rgb(*bottom))
            line.append(_UPPER_HALF, style)
        lines.append(line)
    return lines
