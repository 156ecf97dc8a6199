"""Terminal tables of ``eval``, ``run`` and ``demo``: metrics, gates, kernels, methods, verdict."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.cli.console import echo, print_table, print_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.eval.judging.evaluation_result import Report
    from quantkit.eval.judging.gates import Gate, State
    from quantkit.eval.judging.noise_floor import FloorGap
    from quantkit.eval.measuring.comparison import Comparison
    from quantkit.eval.pages.methods_table import Method
    from quantkit.eval.pages.page import Table


#: Methods whose numbers and intervals fit a terminal side by side.
_SIDE_BY_SIDE = 3


def print_metrics(title: str, comparison: "Comparison") -> None:
    """Print every metric with its backbone, interval and extremes."""
    from quantkit.eval.measuring.number_format import show, show_difference, show_mean
    from quantkit.eval.pages.tables import metric_rows

    rows = [
        (
            row.label,
            row.backbone or "-",
            (show_difference if row.signed else show_mean)(row.summary),
            show(row.summary.minimum),
            show(row.summary.maximum),
            row.better,
        )
        for row in metric_rows(comparison)
    ]
    columns = ("metric", "backbone", "mean [95 %]", "min", "max", "better")
    print_table(f"{title}: {len(comparison.names)} pairs", columns, rows)


def print_floors(comparison: "Comparison", gaps: "tuple[FloorGap, ...]") -> None:
    """Print every noise floor and what the packed pipeline adds to it."""
    from quantkit.eval.measuring.number_format import show_difference, show_mean
    from quantkit.eval.pages.tables import metric_rows

    table = metric_rows(comparison, gaps)
    for index, gap in enumerate(gaps):
        rows = [
            (row.label, (show_difference if row.signed else show_mean)(cell.value),
             show_difference(cell.difference), cell.standing.value)
            for row in table
            if (cell := row.floors[index]).standing is not None
        ]  # fmt: skip
        title = f"Noise floor: the original with {gap.floor.title}"
        if rows:
            print_table(title, ("metric", "floor", "packed - floor", "packed is"), rows)
        else:
            echo(f"{title}: {gap.floor.note}")


def print_gates(gates: "tuple[Gate, ...]") -> None:
    """Print what each gate expects, and the mean."""
    from quantkit.eval.pages.tables import gates_table

    _print(gates_table(gates))


def _print(table: "Table") -> None:
    """Print a page's table, unless it is empty."""
    rows = [[", ".join(filter(None, (c.text, c.soft, c.below))) for c in row]
            for row in table.bodies[0]]  # fmt: skip
    if rows:
        print_table(table.label, table.titles, rows)


def print_report(
    result: "Report", output: Path, *, preview: bool = True, card: bool = False
) -> None:
    """Print the report's numbers, worst pair, verdict, next step, and path.

    Args:
        result: to print.
        output: its folder.
        preview: the worst pair of pictures, too.
        card: the row that tables of other tools print, too.
    """
    from quantkit.eval.pages.sentences import kernel_sentence
    from quantkit.eval.pages.tables import judges_table

    print_metrics(result.title, result.comparison)
    print_floors(result.comparison, result.noise_floor)
    _print(judges_table(result.comparison, result.noise_floor))
    print_gates(result.gates)
    echo(kernel_sentence(result))
    if preview:
        print_worst(result, output)
    if card:
        from quantkit.eval.pages.tables import card_rows

        print_table("As tables of other tools print it", *card_rows(result.comparison))
    echo(result.verdict)
    for step in result.next_steps:
        echo(f"next: {step.what}", *([f"  {step.command}"] * bool(step.command)))
    echo(f"report: {output / 'report.html'}")
    print_outcome(result.gates, result.state)


def print_worst(result: "Report", output: Path) -> None:
    """Show the pair of pictures that changed most, on a terminal."""
    from quantkit.cli.preview import print_pair

    index = result.pictures.order[0]
    name, kind = result.comparison.names[index], result.pictures.kinds[index].value
    title = f"worst pair, {name}: original and packed ({kind})"
    folder = output / "images"
    print_pair(title, folder / "original" / f"{name}.png", folder / "packed" / f"{name}.png")


def print_outcome(gates: "tuple[Gate, ...]", state: "State") -> None:
    """Print the state of the gates on the last line."""
    from quantkit.eval.judging.verdict import headline

    print_verdict(headline(gates), passed=shown(state))


def shown(state: "State") -> bool | None:
    """Return whether gates passed or failed; None where neither is shown."""
    return {"passed": True, "failed": False}.get(state.value)


def exit_by(state: "State") -> None:
    """Exit by the state of the gates: 0 passed, 1 failed or not judged, 3 undecided."""
    if code := {"passed": 0, "undecided": 3}.get(state.value, 1):
        sys.exit(code)


def print_methods(title: str, rows: "Sequence[Method]") -> None:
    """Print the table of methods, whole with the quantities down, or shorter if they are many."""
    from quantkit.eval.pages.methods_table import brief_cells, brief_headings, cells, headings

    if len(rows) > _SIDE_BY_SIDE:
        print_table(title, brief_headings(rows), [brief_cells(row) for row in rows])
        return
    lines = list(zip(headings(rows), *(cells(row) for row in rows), strict=True))
    print_table(title, lines[0], lines[1:])
