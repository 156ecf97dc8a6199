"""Terminal tables of the benchmarks."""

from typing import TYPE_CHECKING

from quantkit.cli.console import echo, print_table

if TYPE_CHECKING:
    from quantkit.bench.kernels.compare import Change, RunComparison
    from quantkit.bench.kernels.kernel_figures import BenchResult, BenchRow
    from quantkit.bench.kernels.machine import Machine
    from quantkit.bench.models.model_result import ModelResult, ModelRow

_COLUMNS = (
    "contender",
    "p50 us",
    "p95",
    "p99",
    "TFLOP/s",
    "GB/s",
    "of copy",
    "of roofline",
    "quantkit is",
    "host us",
    "error",
)


def print_result(result: "BenchResult") -> None:
    """Print the machine, its ceilings, a table per operation, and the absent contenders."""
    from quantkit.bench.kernels.figures import Verdict
    from quantkit.bench.kernels.operations import OPERATIONS

    _print_machine(result.machine, result.clocks)
    _print_ceilings(result)
    for operation in OPERATIONS.values():
        rows = [row for row in result.rows if row.op == operation.name]
        if rows:
            cells = [_cells(row, rows) for row in rows if row.verdict is not Verdict.CANNOT]
            columns = (operation.problem.kind.axes, *_COLUMNS)
            print_table(f"{operation.name}: {operation.title}", columns, cells)
    _print_absent(result)
    if not result.complete:
        echo("interrupted: operations and shapes that are missing above were not measured")


def print_comparison(comparison: "RunComparison") -> None:
    """Print the ratios against a baseline, slowest first, and the verdict."""
    columns = ("operation", "shape", "contender", "before us", "now us", "ratio", "verdict")
    regressions = set(comparison.regressions)
    rows = [_change(change, slower=change in regressions) for change in comparison.changes]
    print_table(f"against {comparison.baseline.path}", columns, rows)
    own = sum(change.row.own for change in comparison.changes)
    echo(
        f"{len(regressions)} of {own} medians of quantkit are more than "
        f"{comparison.threshold:g} times the baseline's"
    )


def print_model_result(result: "ModelResult") -> None:
    """Print the machine, a row per contender, the absent ones, and the profile."""
    _print_machine(result.machine, result.clocks)
    settings = result.settings
    title = (
        f"{result.denoiser.name}: {result.denoiser.class_name}, batch {settings.batch}, latents "
        f"{settings.size}x{settings.size}, random weights ({result.denoiser.source})"
    )
    columns = ("contender", "p50 ms", "p95", "p99", "host ms", "weights MB", "of f16", "peak MB")
    print_table(
        title, (*columns, "error", "quantkit calls"), [_model_cells(row) for row in result.rows]
    )
    _print_in_a_row(result)
    for row in result.rows:
        if row.reason:
            echo(f"{row.contender}: {row.verdict.value}: {row.reason}")
    _print_profiles([row for row in result.rows if row.profile])


def _print_in_a_row(result: "ModelResult") -> None:
    """Print the time of a step in a queue without synchronisation, where it was measured."""
    cells = [
        (row.contender, *(f"{us / 1e3:.2f}" for us in (t.p50_us, t.p95_us, t.p99_us, t.host_us)))
        for row in result.rows
        if (t := row.in_a_row) is not None
    ]
    if cells:
        title = f"{result.settings.in_a_row} steps in a row, waited for once: ms per step"
        print_table(title, ("contender", "p50 ms", "p95", "p99", "host ms"), cells)


def _model_cells(row: "ModelRow") -> tuple[object, ...]:
    timing = row.timing
    if timing is None:
        return (row.contender, row.verdict.value, *[""] * 8)
    times = (timing.p50_us, timing.p95_us, timing.p99_us, timing.host_us)
    sizes = (row.weight_bytes, row.peak_bytes)
    weights, peak = ("" if size is None else f"{size / 1e6:.0f}" for size in sizes)
    calls = ", ".join(f"{count} {backend}" for backend, count in _by_backend(row).items())
    share = "" if row.of_f16 is None else f"{row.of_f16:.1%}"
    error = "" if row.error is None else f"{row.error:.1e}"
    return (row.contender, *(f"{us / 1e3:.2f}" for us in times), weights, share, peak, error, calls)


def _by_backend(row: "ModelRow") -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, count in row.calls.items():
        backend = name.rpartition(" ")[2]
        counts[backend] = counts.get(backend, 0) + count
    return counts


def _print_profiles(rows: "list[ModelRow]") -> None:
    if not rows:
        return
    groups = list(dict.fromkeys(group for row in rows for group in row.profile))
    table = [
        (group, *(f"{row.profile[group]:.2f}" if group in row.profile else "" for row in rows))
        for group in groups
    ]
    print_table("milliseconds of one step", ("group", *(row.contender for row in rows)), table)


def _print_ceilings(result: "BenchResult") -> None:
    ceilings = result.ceilings
    copy = ceilings.copy
    echo(f"copy: {copy.rate:.0f} GB/s ({copy.source})")
    for precision, peak in ceilings.matmul.items():
        origin = "measured" if peak.measured else "data sheet"
        echo(f"{precision}: {peak.rate:.4g} TFLOP/s, {origin} ({peak.source})")


def _print_machine(machine: "Machine", measured: "tuple[dict[str, str], dict[str, str]]") -> None:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    echo(f"{machine.device}, {machine.architecture}; kernels: {machine.kernels or 'none'}")
    echo(f"{versions}, Python {machine.python}; commit {machine.commit or 'unknown'}")
    for when, clocks in zip(("before", "after"), measured, strict=True):
        text = ", ".join(f"{name} {value}" for name, value in clocks.items())
        echo(f"{when}: {text or 'clocks are not known'}")


def _cells(row: "BenchRow", rows: "list[BenchRow]") -> tuple[object, ...]:
    head = (row.shape.label, row.contender)
    timing, rates = row.timing, row.rates
    if timing is None or rates is None:
        return (*head, row.verdict.value, *[""] * (len(_COLUMNS) - 3), _error(row))
    return (
        *head,
        f"{timing.p50_us:.1f}",
        f"{timing.p95_us:.1f}",
        f"{timing.p99_us:.1f}",
        "" if rates.tflops is None else f"{rates.tflops:.4g}",
        f"{rates.gbs:.0f}" if rates.gbs > 10 else f"{rates.gbs:.2f}",
        f"{rates.of_copy:.0%}",
        "" if rates.of_roofline is None else f"{rates.of_roofline:.0%}",
        _lead(row, rows),
        f"{timing.host_us:.0f}",
        _error(row),
    )


def _lead(row: "BenchRow", rows: "list[BenchRow]") -> str:
    """Return how many times as fast quantkit's first contender is as this one."""
    own = next((r for r in rows if r.own and r.shape == row.shape and r.timing), None)
    if own is None or own is row or row.timing is None or own.timing is None:
        return ""
    return f"{row.timing.p50_us / own.timing.p50_us:.2f}x"


def _error(row: "BenchRow") -> str:
    return "" if row.error is None else f"{row.error:.1e}"


def _print_absent(result: "BenchResult") -> None:
    """Print one line per contender and reason, however many shapes it concerns."""
    reasons: dict[tuple[str, str, str, str], list[str]] = {}
    for row in result.rows:
        if row.reason:
            key = (row.op, row.contender, row.verdict.value, row.reason)
            reasons.setdefault(key, []).append(row.shape.label)
    for (op, contender, verdict, reason), shapes in reasons.items():
        where = shapes[0] if len(shapes) == 1 else f"{len(shapes)} shapes"
        echo(f"{op}, {contender}: {verdict} ({where}): {reason}")


def _change(change: "Change", *, slower: bool) -> tuple[object, ...]:
    row = change.row
    now = row.verdict.value if change.after_us is None else f"{change.after_us:.1f}"
    verdict = "slower" if slower else "ok" if row.own else "not judged"
    ratio = "" if change.after_us is None else f"{change.ratio:.2f}"
    return row.op, row.shape.label, row.contender, f"{change.before_us:.1f}", now, ratio, verdict
