"""What commands print: progress on stderr, tables and JSON on stdout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from quantkit.progress import Progress, silent


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """Yield a progress callback that draws one bar per step on stderr; silent when quiet."""
    if quiet:
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield report


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    least_width: int = 0,
) -> None:
    """Print a table; numbers are aligned to the right.

    Args:
        least_width: letters in a line of a file or a pipe, whose width nobody sees.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(rows) and isinstance(rows[0][index], int | float)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    # Without markup: names in brackets, as "LPIPS [ImageNet AlexNet]", are text and not a style.
    console = Console(markup=False)
    if not console.is_terminal:
        console.width = max(console.width, least_width)
    # Apart from the table, and never folded: a path in it can be found and copied.
    console.print(title, style="table.title", soft_wrap=True, highlight=False)
    console.print(table)


def print_json(value: object) -> None:
    """Print JSON that a program can read."""
    import json

    click.echo(json.dumps(value, indent=2))
