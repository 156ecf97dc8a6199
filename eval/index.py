"""The demo's index.html: its reports side by side."""

from pathlib import Path

from quantkit.files import staged_file

from .demo import Outcome, methods
from .methods import page_values, write_table
from .report import render


def write_index(path: Path, outcomes: tuple[Outcome, ...], seconds: float) -> None:
    """Write the page that compares the demo's rows and links their reports, and the bare table.

    Args:
        path: index.html in the folder that holds the reports' folders.
        outcomes: made on the same prompts.
        seconds: how long the demo took.
    """
    commands = dict.fromkeys(line for o in outcomes for line in o.report.commands)
    write_table(methods(outcomes), path.parent, tuple(commands))
    values = {**page_values(methods(outcomes), path.parent), "seconds": seconds}
    with staged_file(path, force=True) as stage:
        stage.write_text(render("index.html.j2", values), encoding="utf-8")
