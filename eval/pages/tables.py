"""The rows of a report's tables, as values: metrics beside their noise floors."""

from dataclasses import dataclass

from quantkit.eval.judging.evaluation_result import Timesteps
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


@dataclass(frozen=True)
class JudgeRow:
    """What one judge makes of the pictures, and of each noise floor's."""

    title: str
    source: str
    better: str
    #: None: not measured, as the note says
    packed: Summary | None
    #: packed - original, paired by prompt; None for what takes pairs or sets
    change: Summary | None
    #: of the noise floors, in their order: the change, or where there is none the value
    floors: tuple[Summary | None, ...]
    note: str


def judge_rows(comparison: Comparison, gaps: tuple[FloorGap, ...] = ()) -> list[JudgeRow]:
    """Return a line for every judge that was asked."""
    floors = [gap.floor.comparison for gap in gaps]
    return [
        JudgeRow(
            found.judge.title,
            found.source,
            "higher" if found.judge.higher_is_better else "lower",
            found.summary if found.packed else None,
            found.change,
            tuple(None if floor is None else _told(floor, index) for floor in floors),
            found.note,
        )
        for index, found in enumerate(comparison.judgements)
    ]


def _told(floor: Comparison, index: int) -> Summary | None:
    found = floor.judgements[index]
    return (found.change or found.summary) if found.packed else None


@dataclass(frozen=True)
class StepRow:
    """One denoising step: NMSE of packed, of the packed denoiser alone, of each noise floor."""

    timestep: float
    values: tuple[float | None, ...]


def step_rows(timesteps: Timesteps, gaps: tuple[FloorGap, ...]) -> list[StepRow]:
    """Return the mean errors of every step; empty when none were measured."""
    measured = timesteps.local or timesteps.divergence
    if measured is None:
        return []
    runs = [timesteps.divergence, timesteps.local, *(gap.floor.divergence for gap in gaps)]
    means = [None if run is None else run.mean for run in runs]
    return [
        StepRow(timestep, tuple(None if mean is None else mean[index] for mean in means))
        for index, timestep in enumerate(measured.timesteps)
    ]
