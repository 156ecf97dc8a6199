"""Rows of the table of metrics: each metric beside its noise floors."""

from dataclasses import dataclass

from quantkit.eval.judging.noise_floor import FloorGap
from quantkit.eval.judging.verdict import Standing, standing_to
from quantkit.eval.measuring.comparison import ClipScores, Comparison
from quantkit.eval.measuring.metrics import METRICS
from quantkit.eval.measuring.sample_statistics import Summary


@dataclass(frozen=True)
class FloorCell:
    """One metric of one noise floor; None where it has no such number."""

    value: Summary | None = None
    #: packed - floor, paired by prompt
    difference: Summary | None = None
    standing: Standing | None = None


@dataclass(frozen=True)
class MetricRow:
    """One line of the metric table."""

    title: str
    backbone: str
    unit: str
    better: str
    summary: Summary
    #: one per noise floor, in their order
    floors: tuple[FloorCell, ...] = ()
    #: the metric is a difference: its mean wants a sign
    signed: bool = False

    @property
    def label(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def metric_rows(comparison: Comparison, gaps: tuple[FloorGap, ...] = ()) -> list[MetricRow]:
    """Return the metric table: pair metrics, then both CLIP scores and what lies between them."""
    rows = [
        MetricRow(score.metric.title, score.backbone, score.metric.unit,
                  score.metric.better.value, score.summary,
                  tuple(_pair_cell(name, gap) for gap in gaps))
        for name, score in comparison.scores.items()
    ]  # fmt: skip
    if comparison.clip is not None:
        rows += _clip_rows(comparison.clip, gaps)
    return rows


def _clip_rows(clip: ClipScores, gaps: tuple[FloorGap, ...]) -> list[MetricRow]:
    name, better = clip.backbone, METRICS["clip"].better.value
    floors = [None if (c := gap.floor.comparison) is None else c.clip for gap in gaps]
    none = tuple(FloorCell() for _ in gaps)
    scores = tuple(FloorCell(None if floor is None else floor.packed.summary) for floor in floors)
    changes = tuple(
        FloorCell() if floor is None else _cell("clip", floor.change, gap)
        for floor, gap in zip(floors, gaps, strict=True)
    )
    losses = tuple(FloorCell(None if floor is None else floor.loss) for floor in floors)
    return [
        MetricRow("CLIP score, original", name, "", better, clip.original.summary, none),
        MetricRow("CLIP score, packed", name, "", better, clip.packed.summary, scores),
        MetricRow("CLIP score change", name, "points", better, clip.change, changes, signed=True),
        MetricRow("CLIP score loss", name, "%", "lower", clip.loss, losses),
    ]


def _pair_cell(metric: str, gap: FloorGap) -> FloorCell:
    if gap.floor.comparison is None or metric not in gap.differences:
        return FloorCell()
    return _cell(metric, gap.floor.comparison.scores[metric].summary, gap)


def _cell(metric: str, value: Summary, gap: FloorGap) -> FloorCell:
    difference = gap.differences[metric]
    return FloorCell(value, difference, standing_to(gap, metric))
