"""Figures of a run of a benchmark: rows of contenders, where they were measured, and their file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from quantkit.bench.kernels.machine import Machine
from quantkit.bench.kernels.timing import Timing, TimingPlan
from quantkit.storage.files import staged_file

#: Of the files that this version writes.
VERSION = 1


class Verdict(Enum):
    """The outcome of a contender."""

    TIMED = "timed"
    #: its result is wrong, so its time means nothing
    WRONG = "wrong"
    #: it cannot run here
    CANNOT = "cannot run"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one problem."""

    contender: str
    verdict: Verdict
    #: why it was not timed; empty when it was
    reason: str = ""
    #: how far its result is off, as its benchmark measures that
    error: float | None = None
    timing: Timing | None = None


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, kw_only=True)
class Measurement(Generic[R]):
    """A whole run."""

    schema: ClassVar[str]

    machine: Machine
    #: before and after, as nvidia-smi names them
    clocks: tuple[dict[str, str], dict[str, str]]
    plan: TimingPlan
    rows: tuple[R, ...]

    @property
    def wrong(self) -> tuple[R, ...]:
        """Rows whose result is wrong."""
        return tuple(row for row in self.rows if row.verdict is Verdict.WRONG)

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON values."""
        return {
            "schema": self.schema,
            "schema_version": VERSION,
            "machine": asdict(self.machine),
            "clocks": {"before": self.clocks[0], "after": self.clocks[1]},
            **self.circumstances(),
            "plan": asdict(self.plan),
            "rows": [{**asdict(row), "verdict": row.verdict.value} for row in self.rows],
        }

    def circumstances(self) -> Mapping[str, Any]:
        """Return what else the file says of the run."""
        return {}


class Figures(Protocol):
    """Figures that have a file."""

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON values, rows among them."""


def save_figures(figures: Figures, path: Path, *, force: bool) -> None:
    """Write figures as JSON, a row a line: two files can be compared by eye.

    Raises:
        OutputError: the file exists without ``force``, or cannot be written.
    """
    values = figures.to_json()
    head = {key: value for key, value in values.items() if key != "rows"}
    rows = ",\n".join(f"  {json.dumps(row)}" for row in values["rows"])
    text = f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'
    with staged_file(path, force=force) as stage:
        stage.write_text(text, encoding="utf-8")
