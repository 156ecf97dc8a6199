"""Comparing a run with an earlier one of the same device."""

from dataclasses import dataclass
from typing import Any

from quantkit.bench.kernels.figures import Verdict
from quantkit.bench.kernels.kernel_figures import BenchResult, BenchRow, EarlierRun
from quantkit.errors import ArtefactError


@dataclass(frozen=True)
class Change:
    """One row against its baseline."""

    row: BenchRow
    before_us: float
    #: None: it was timed then and is not now
    after_us: float | None

    @property
    def ratio(self) -> float:
        """Time now over time then; infinite when there is none now."""
        return float("inf") if self.after_us is None else self.after_us / self.before_us


@dataclass(frozen=True)
class RunComparison:
    """All rows that both runs have."""

    baseline: EarlierRun
    #: largest ratio that passes
    threshold: float
    #: slowest first
    changes: tuple[Change, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Rows of quantkit past the threshold. Libraries are shown and not judged."""
        return tuple(c for c in self.changes if c.row.own and c.ratio > self.threshold)


def check_device(baseline: EarlierRun, device: str, architecture: str) -> None:
    """Refuse a baseline of another device, before anything is measured.

    Raises:
        ArtefactError: naming both.
    """
    if (baseline.device, baseline.architecture) != (device, architecture):
        raise ArtefactError(
            f"{baseline.path}: measured on {baseline.device} ({baseline.architecture}), this is "
            f"{device} ({architecture}); save a baseline on this device"
        )


def compare(result: BenchResult, baseline: EarlierRun, threshold: float) -> RunComparison:
    """Match the rows of a run with those of its baseline.

    Rows that the baseline has and this run was not asked for do not count; nor do new ones.

    Raises:
        ArtefactError: the baseline is of another device, or no row is in both.
    """
    check_device(baseline, result.machine.device, result.machine.architecture)
    changes = [
        Change(row, before, _p50(row))
        for row in result.rows
        if (before := baseline.p50_us.get(row.key)) is not None
    ]
    if not changes:
        raise ArtefactError(
            f"{baseline.path}: shares no operation and shape with this run; measure the same ones"
        )
    changes.sort(key=lambda change: -change.ratio)
    return RunComparison(baseline, threshold, tuple(changes))


def _p50(row: BenchRow) -> float | None:
    return row.timing.p50_us if row.verdict is Verdict.TIMED and row.timing else None


def to_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison as JSON values; ``after_us`` is null where none was timed now."""
    regressions = {change.row.key for change in comparison.regressions}
    return {
        "baseline": str(comparison.baseline.path),
        "threshold": comparison.threshold,
        "changes": [
            {
                "op": change.row.op,
                "contender": change.row.contender,
                "shape": change.row.shape.label,
                "before_us": change.before_us,
                "after_us": change.after_us,
                "regression": change.row.key in regressions,
            }
            for change in comparison.changes
        ],
    }
