"""The figures of a run of the kernel benchmark, and an earlier run's."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from quantkit.bench.kernels.figures import VERSION, Measurement, Row
from quantkit.bench.kernels.kernel_shapes import AnyShape, shape_of
from quantkit.bench.kernels.roofline import Ceilings
from quantkit.storage.jsonfile import read_measured

SCHEMA = "quantkit.kernels.bench"


@dataclass(frozen=True)
class Rates:
    """Rates that follow from a median."""

    #: multiplications and additions over the time; None for what multiplies nothing
    tflops: float | None
    #: operands and result once, over the time
    gbs: float
    #: of the bandwidth of a large copy
    of_copy: float
    #: the roofline's floor over the time; None when the peak is unknown
    of_roofline: float | None


@dataclass(frozen=True, kw_only=True)
class BenchRow(Row):
    """One contender on one operation and shape.

    Its error is the largest over the rms of the exact result; of codes, the share that differs.
    """

    op: str
    #: True for quantkit's own
    own: bool
    shape: AnyShape
    rates: Rates | None = None
    #: kernels of quantkit that ran: operation, variant, back end
    kernels: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Operation, contender and shape, by which rows of two runs match."""
        return self.op, self.contender, self.shape.label


@dataclass(frozen=True, kw_only=True)
class BenchResult(Measurement[BenchRow]):
    """A whole run."""

    schema: ClassVar[str] = SCHEMA

    ceilings: Ceilings
    #: False when it was interrupted
    complete: bool = True

    def circumstances(self) -> Mapping[str, Any]:
        """Return the limits of the device, and whether all was measured."""
        return {"ceilings": asdict(self.ceilings), "complete": self.complete}


@dataclass(frozen=True)
class EarlierRun:
    """Medians of an earlier run, and its device."""

    path: Path
    device: str
    architecture: str
    #: (operation, contender, shape) -> median in microseconds, of rows that were timed
    p50_us: dict[tuple[str, str, str], float]


def load_baseline(path: Path) -> EarlierRun:
    """Read what ``save_figures`` wrote, as far as a comparison needs it.

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
        raise ValueError(f"{row['op']} {shape.label}: p50_us {p50}, expected a time")
    return (str(row["op"]), str(row["contender"]), shape.label), p50
