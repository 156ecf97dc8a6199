"""The demo's index.html: its reports side by side."""

from pathlib import Path

from quantkit.files import staged_file

from .demo import Outcome, table
from .report import render


def write_index(path: Path, outcomes: tuple[Outcome, ...], seconds: float) -> None:
    """Write the page that compares the demo's configurations and links their reports.

    Args:
        path: index.html in the folder that holds the reports' folders.
        outcomes: made on the same prompts.
        seconds: how long the demo took.
    """
    headings, rows = table(outcomes)
    first = outcomes[0].report
    values = {
        "outcomes": outcomes,
        "run": first.run,
        "headings": headings,
        "rows": list(zip(rows, outcomes, strict=True)),
        "pictures": list(zip(first.comparison.names, first.run.prompts, strict=True)),
        # one machine, one cause: the same line would stand there once per configuration
        "warnings": sorted({line for outcome in outcomes for line in outcome.report.warnings}),
        "seconds": seconds,
    }
    with staged_file(path, force=True) as stage:
        stage.write_text(render("index.html.j2", values), encoding="utf-8")
