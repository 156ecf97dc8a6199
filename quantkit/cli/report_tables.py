"""What ``eval``, ``run`` and ``demo`` print: metrics, gates, kernels, methods, verdict."""

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.cli.console import echo, print_table, print_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.eval.comparison import Comparison
    from quantkit.eval.gates import Gate
    from quantkit.eval.methods import Method
    from quantkit.eval.noise_floor import FloorGap
    from quantkit.eval.result import Report


#: Methods whose numbers and intervals fit a terminal beside one another.
_SIDE_BY_SIDE = 3


def print_metrics(title: str, comparison: "Comparison") -> None:
    """Print every metric with its backbone, interval and extremes."""
    from quantkit.eval.number_format import show, show_difference, show_mean
    from quantkit.eval.tables import metric_rows

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
    from quantkit.eval.number_format import show_difference, show_mean
    from quantkit.eval.tables import metric_rows

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
    """Print what each gate wanted and found."""
    from quantkit.eval.number_format import show

    words = {None: "not measured", True: "passes", False: "FAILS"}
    rows = [
        (gate.title, gate.wanted, show(gate.found, gate.unit), words[gate.passed]) for gate in gates
    ]
    if rows:
        print_table("Gates", ("gate", "wanted", "found", "result"), rows)


def print_report(result: "Report", output: Path) -> None:
    """Print the report's numbers, its verdict and where it lies."""
    from quantkit.eval.sentences import kernel_sentence

    print_metrics(result.title, result.comparison)
    print_floors(result.comparison, result.noise_floor)
    print_gates(result.gates)
    echo(kernel_sentence(result))
    echo(result.verdict)
    echo(f"report: {output / 'report.html'}")
    print_outcome(result.gates)


def print_outcome(gates: "tuple[Gate, ...]") -> None:
    """Print on the last line whether the gates hold."""
    from quantkit.eval.verdict import headline

    judged = [gate.passed for gate in gates if gate.passed is not None]
    print_verdict(headline(gates), passed=all(judged) if judged else None)


def print_methods(title: str, rows: "Sequence[Method]") -> None:
    """Print the table of methods, whole with the quantities down, or shorter if they are many."""
    from quantkit.eval.methods import brief_cells, brief_headings, cells, headings

    if len(rows) > _SIDE_BY_SIDE:
        print_table(title, brief_headings(rows), [brief_cells(row) for row in rows])
        return
    lines = list(zip(headings(rows), *(cells(row) for row in rows), strict=True))
    print_table(title, lines[0], lines[1:])
