"""What ``eval`` and ``run`` print of a report: metrics, gates, kernels, verdict."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli.console import print_table

if TYPE_CHECKING:
    from quantkit.eval.comparison import Comparison
    from quantkit.eval.gates import Gate
    from quantkit.eval.result import Report


def print_metrics(title: str, comparison: "Comparison") -> None:
    """Print every metric with its backbone, spread and interval."""
    from quantkit.eval.report import metric_rows, show_interval
    from quantkit.eval.result import show

    rows = [
        (
            f"{row.title} ({row.unit})" if row.unit else row.title,
            row.backbone or "-",
            show(row.summary.mean),
            show_interval(row.summary.interval),
            show(row.summary.minimum),
            show(row.summary.maximum),
            row.better,
        )
        for row in metric_rows(comparison)
    ]
    columns = ("metric", "backbone", "mean", "95 % interval", "min", "max", "better")
    print_table(f"{title}: {len(comparison.names)} pairs", columns, rows)


def print_gates(gates: "tuple[Gate, ...]") -> None:
    """Print what each gate wanted and found."""
    from quantkit.eval.result import show

    words = {None: "not measured", True: "passes", False: "FAILS"}
    rows = [
        (gate.title, gate.wanted, show(gate.found, gate.unit), words[gate.passed]) for gate in gates
    ]
    if rows:
        print_table("Gates", ("gate", "wanted", "found", "result"), rows)


def print_report(result: "Report", output: Path) -> None:
    """Print the report's numbers, its verdict and where it lies."""
    from quantkit.eval.report import kernel_sentence

    print_metrics(result.title, result.comparison)
    print_gates(result.gates)
    click.echo(kernel_sentence(result))
    click.echo(result.verdict)
    click.echo(f"report: {output / 'report.html'}")
