"""Output of commands: progress on stderr, tables and JSON on stdout.

Names in models, paths and prompts are untrusted text: characters that are not printable are
escaped, so that they can neither move the cursor nor begin a line.
"""

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from quantkit.progress import Progress, silent

if TYPE_CHECKING:
    from rich.console import Console

#: Letters of a message: where it begins says what and where, its end how to go on.
_MOST = 500
_BEGINNING = 300
#: Letters in a line of a file or a pipe: more than a table of names has.
_UNFOLDED = 100_000


def printable(text: object) -> str:
    r"""Return text on one line of printable characters; others are escaped, as \x1b and \n."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )


def one_line(text: object) -> str:
    """Return a message on one line of at most 500 printable characters, cut in its middle."""
    line = printable(text)
    if len(line) <= _MOST:
        return line
    return f"{line[:_BEGINNING]} ... {line[_BEGINNING + 5 - _MOST :]}"


class ReaderGoneError(Exception):
    """The reader of stdout is gone; click's exit code 1 for it would mean a failed gate."""


def echo(*lines: object, err: bool = False) -> None:
    """Print lines to stdout, or to stderr."""
    for line in lines:
        _write(printable(line), err=err)


def print_error(text: object) -> None:
    """Print an error to stderr; where that cannot be written, the exit code remains."""
    with suppress(OSError):
        _write(one_line(f"quantkit: error: {text}"), err=True)


class Warnings(logging.Handler):
    """Prints what the library logs to stderr, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        text = f"quantkit: {record.levelname.lower()}: {record.getMessage()}"
        _write(one_line(text), err=True)


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """Yield a progress callback that draws one bar per step on stderr; silent when quiet.

    Nothing is drawn before the first step, so an error at once stands alone.
    """
    if quiet:
        yield silent
        return
    with ExitStack() as stack:
        drawn: Progress | None = None

        def report(step: str, done: int, total: int) -> None:
            nonlocal drawn
            drawn = drawn or _draw(stack)
            drawn(step, done, total)

        yield report


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    echo(line, err=True)


def _draw(stack: ExitStack) -> Progress:
    """Return a progress callback whose bars are on the terminal until the stack unwinds."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from quantkit.cli.rate_column import RateColumn

    columns = (
        # Without markup, as tables.
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        # What is left; what it took, once it is over.
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    bars = stack.enter_context(Bars(*columns, console=_console(stderr=True)))
    tasks = {}

    def report(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = bars.add_task(printable(step), total=total)
        bars.update(tasks[step], completed=done, total=total)

    return report


def some(names: Sequence[str]) -> str:
    """Return the first names; a long list is in --json."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> None:
    """Print a table, but for a command that was told --quiet; numbers are aligned to the right.

    A terminal folds what is too wide; in a file or a pipe a row is one line.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.params.get("quiet"):
        return
    from rich.table import Table

    table = Table(show_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(rows) and isinstance(rows[0][index], int | float)
        justify: Any = "right" if numeric else "left"
        table.add_column(printable(column), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(
            *(f"{cell:.4g}" if isinstance(cell, float) else printable(cell) for cell in row)
        )
    console = _console()
    if not console.is_terminal:
        # Lines are found with grep there, and nobody sees a width.
        console.width = _UNFOLDED
    # Outside of the table, and never folded: a path in it can be found and copied.
    console.print(printable(title), style="table.title", soft_wrap=True, highlight=False)
    console.print(table)


def print_verdict(text: str, *, passed: bool | None) -> None:
    """Print the verdict on one line, in green, red, or yellow where it is open."""
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[passed]
    _console().print(printable(text), style=style, soft_wrap=True, highlight=False)


def terminal() -> "Console | None":
    """Return the console where stdout is a terminal with colours; None elsewhere."""
    console = _console()
    return (
        console if console.is_terminal and console.color_system and not console.no_color else None
    )


def command_line() -> str:
    """Return the command line as it was typed."""
    return shlex.join(["quantkit", *sys.argv[1:]])


def print_json(value: object) -> None:
    """Print JSON that a program can read."""
    import json

    _write(json.dumps(value, indent=2))


def _write(text: str, *, err: bool = False) -> None:
    try:
        click.echo(text, err=err)
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def _console(*, stderr: bool = False) -> "Console":
    """Return a console without markup in names."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise ReaderGoneError

    # Without markup: names in brackets, as "LPIPS [ImageNet AlexNet]", are text and not a style.
    return Plain(stderr=stderr, markup=False, emoji=False)
