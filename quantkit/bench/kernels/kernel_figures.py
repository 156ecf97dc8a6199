"""The figures of a run of the kernel benchmark, and their file."""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

from quantkit.bench.kernels.kernel_shapes import AnyShape, shape_of
from quantkit.bench.kernels.machine import Machine
from quantkit.bench.kernels.roofline import Ceilings
from quantkit.bench.kernels.timing import Timing, TimingPlan
from quantkit.storage.files import staged_file
from quantkit.storage.jsonfile import read_measured

SCHEMA, VERSION = "quantkit.kernels.bench", 1


class Verdict(Enum):
    """What became of a contender on a shape."""

    TIMED = "timed"
    #: its result is wrong, so its time means nothing
    WRONG = "wrong"
    #: it cannot run here
    CANNOT = "cannot run"


@dataclass(frozen=True)
class Rates:
    """What a median means."""

    #: multiplications and additions over the time; None for what multiplies nothing
    tflops: float | None
    #: operands and result once, over the time
    gbs: float
    #: of the bandwidth of a large copy
    of_copy: float
    #: the roofline's floor over the time; None when the peak is unknown
    of_roofline: float | None


@dataclass(frozen=True)
class BenchRow:
    """One contender on one operation and shape."""

    op: str
    contender: str
    #: True for quantkit's own
    own: bool
    shape: AnyShape
    verdict: Verdict
    #: why it was not timed; empty when it was
    reason: str = ""
    #: largest error over the rms of the exact result; of codes, the share that differs
    error: float | None = None
    timing: Timing | None = None
    rates: Rates | None = None
    #: kernels of quantkit that ran: operation, variant, back end
    kernels: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """What rows of two runs are matched by."""
        return self.op, self.contender, self.shape.label


@dataclass(frozen=True)
class BenchResult:
    """A whole run."""

    machine: Machine
    #: before and after, as nvidia-smi names them
    clocks: tuple[dict[str, str], dict[str, str]]
    ceilings: Ceilings
    plan: TimingPlan
    rows: tuple[BenchRow, ...]
    #: False when it was interrupted
    complete: bool = True

    @property
    def wrong(self) -> tuple[BenchRow, ...]:
        """Rows whose result is wrong."""
        return tuple(row for row in self.rows if row.verdict is Verdict.WRONG)


@dataclass(frozen=True)
class EarlierRun:
    """What a comparison needs of an earlier run."""

    path: Path
    device: str
    architecture: str
    #: (operation, contender, shape) -> median in microseconds, of rows that were timed
    p50_us: dict[tuple[str, str, str], float]


def to_json(result: BenchResult) -> dict[str, Any]:
    """Return the file's JSON values."""
    ceilings = {
        "copy": asdict(result.ceilings.copy),
        "matmul": {p.value: asdict(c) for p, c in result.ceilings.matmul.items()},
    }
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "machine": asdict(result.machine),
        "clocks": {"before": result.clocks[0], "after": result.clocks[1]},
        "ceilings": ceilings,
        "plan": asdict(result.plan),
        "complete": result.complete,
        "rows": [{**asdict(row), "verdict": row.verdict.value} for row in result.rows],
    }


def save_result(result: BenchResult, path: Path, *, force: bool) -> None:
    """Write the file that ``load_baseline`` reads.

    Raises:
        OutputError: it exists without ``force``, or cannot be written.
    """
    with staged_file(path, force=force) as stage:
        stage.write_text(_text(to_json(result)), encoding="utf-8")


def load_baseline(path: Path) -> EarlierRun:
    """Read what ``save_result`` wrote, as far as a comparison needs it.

    Raises:
        ArtefactError: missing, not such a file, of another version, or damaged.
    """
    return read_measured(
        path, SCHEMA, VERSION, lambda values: _baseline(path, values), command="kernels bench"
    )


def _baseline(path: Path, values: dict[str, Any]) -> EarlierRun:
    machine = values["machine"]
    times = dict(_timed(row) for row in values["rows"] if row["timing"] is not None)
    return EarlierRun(path, str(machine["device"]), str(machine["architecture"]), times)


def _timed(row: dict[str, Any]) -> tuple[tuple[str, str, str], float]:
    shape = shape_of(row["shape"])
    p50 = float(row["timing"]["p50_us"])
    if not (isfinite(p50) and p50 > 0):
        raise ValueError(f"{row['op']} {shape.label}: p50_us {p50}, wanted a time")
    return (str(row["op"]), str(row["contender"]), shape.label), p50


def _text(values: dict[str, Any]) -> str:
    """Return JSON with one row of figures a line, so that two files can be compared by eye."""
    head = {key: value for key, value in values.items() if key != "rows"}
    rows = ",\n".join(f"  {json.dumps(row)}" for row in values["rows"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'
