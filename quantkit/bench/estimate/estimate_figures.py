"""The figures of an estimate."""

from dataclasses import asdict, dataclass
from typing import Any

from quantkit.bench.estimate.cards import Card
from quantkit.bench.kernels.figures import VERSION
from quantkit.bench.models.denoisers import Denoiser
from quantkit.bench.models.model_result import ModelBenchSettings, model_facts


@dataclass(frozen=True)
class Span:
    """Milliseconds: between the card's optimistic and its pessimistic figures."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2

    def __add__(self, other: "Span") -> "Span":
        return Span(self.low + other.low, self.high + other.high)


@dataclass(frozen=True)
class GroupEstimate:
    """The kernels of one kind."""

    group: str
    kernels: int
    flops: float
    nbytes: int
    ms: Span
    #: what bounds kernels -> milliseconds of those that it bounds
    bounds: dict[str, float]


@dataclass(frozen=True)
class EstimateRow:
    """One contender."""

    contender: str
    #: why there is no estimate; empty when there is one
    reason: str = ""
    #: of one step: the device's, or the host's where that takes longer
    ms: Span | None = None
    #: what the host takes to ask for a step's kernels; None where a graph is replayed
    host_ms: Span | None = None
    groups: tuple[GroupEstimate, ...] = ()
    weight_bytes: int | None = None


@dataclass(frozen=True)
class EstimateResult:
    """All contenders on one card."""

    card: Card
    denoiser: Denoiser
    settings: ModelBenchSettings
    rows: tuple[EstimateRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON values."""
        card = asdict(self.card)
        del card["efficiency"]
        return {
            "schema": "quantkit.model.estimate",
            "schema_version": VERSION,
            "card": card,
            **model_facts(self.denoiser, self.settings),
            "rows": [_row(row) for row in self.rows],
        }


def _row(row: EstimateRow) -> dict[str, Any]:
    groups = [{**asdict(group), "ms": _span(group.ms)} for group in row.groups]
    return {
        **asdict(row), "ms": _span(row.ms), "host_ms": _span(row.host_ms), "groups": groups
    }  # fmt: skip


def _span(span: Span | None) -> dict[str, float] | None:
    if span is None:
        return None
    return {"low": span.low, "middle": span.middle, "high": span.high}
