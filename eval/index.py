"""The demo's index.html: its reports side by side."""

from pathlib import Path

from quantkit.files import staged_file

from .demo import Outcome, methods
from .methods import page_values
from .report import render


def write_index(path: Path, outcomes: tuple[Outcome, ...], seconds: float) -> None:
    """Write the page that compares the demo's configurations and links their reports.

    Args:
        path: index.html in the folder that holds the reports' folders.
        outcomes: made on the same prompts.
        seconds: how long the demo took.
    """
    values = {**page_values(methods(outcomes), path.parent), "seconds": seconds}
    with staged_file(path, force=True) as stage:
        stage.write_text(render("index.html.j2", values), encoding="utf-8")
