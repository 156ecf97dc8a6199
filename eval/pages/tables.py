"""Tables of gates, judges and model cards, and rows of metrics with their noise floors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.eval.judging.gates import Gate
from quantkit.eval.judging.noise_floor import FloorGap
from quantkit.eval.judging.verdict import Standing, standing_to
from quantkit.eval.measuring.comparison import ClipScores, Comparison
from quantkit.eval.measuring.judges import Judgement
from quantkit.eval.measuring.metrics import METRICS, Better
from quantkit.eval.measuring.number_format import show, show_difference, show_interval, show_mean
from quantkit.eval.measuring.sample_statistics import Summary, summarize
from quantkit.eval.pages.page import Cell, Row, Table
from quantkit.eval.pages.sentences import gate_remark


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


def gates_table(gates: Sequence[Gate]) -> Table:
    """Return what each gate shows, the mean with its interval, and what is expected."""
    titles = ("Gate", "Result", "Mean", "Expected", "Remark")
    return Table("Gates", titles, tuple(map(_gate, gates)), numbers=(2, 3))


def _gate(gate: Gate) -> Row:
    words = {None: gate.state.value, True: "\u2713 passes", False: "\u2717 fails"}[gate.passed]
    result = Cell(words, style={None: "", True: "good", False: "bad"}[gate.passed])
    interval = f" {show_interval(gate.interval)}" if gate.interval else ""
    found = f"{show(gate.found, gate.unit)}{interval}"
    return (gate.title, result, found, gate.expected, gate_remark(gate))


def judges_table(comparison: Comparison, gaps: tuple[FloorGap, ...]) -> Table:
    """Return what other judges make of the pictures, and of the noise floors'."""
    floors = [gap.floor.comparison for gap in gaps]
    rows = tuple(
        _judge(found, [floor.judgements[index] if floor else None for floor in floors])
        for index, found in enumerate(comparison.judgements)
    )
    titles = (
        "Judge", "Packed", "Packed - original",
        *(f"Noise floor: {gap.floor.title}" for gap in gaps),
    )  # fmt: skip
    return Table("Other judges", titles, rows, numbers=range(1, len(titles)))


def _judge(found: Judgement, floors: Sequence[Judgement | None]) -> Row:
    source = f"{found.source}, " if found.source else ""
    better = "higher" if found.judge.higher_is_better else "lower"
    mean = Cell(show_mean(found.summary)) if found.packed else Cell(found.note, style="words")
    label = Cell(found.judge.title, f"{source}{better} is better")
    return (label, mean, show_difference(found.change), *map(_judged, floors))


def _judged(floor: Judgement | None) -> str:
    """Return what a noise floor changes, of what takes pairs or sets its value."""
    if floor is None or not floor.packed:
        return "-"
    return show_difference(floor.change) if floor.change else show_mean(floor.summary)


#: Metrics of pairs that tables of other tools print.
_SHOWN = ("lpips", "psnr", "ssim")


@dataclass(frozen=True)
class CardColumn:
    """A metric or judge; None where the original by itself has no such number."""

    name: str
    title: str
    #: the network behind the number, or whose weights; empty when there is none
    source: str
    higher: bool
    original: Summary | None
    packed: Summary


def card_rows(comparison: Comparison) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return titles and rows of what tables of other tools print: 16 bit, and packed."""
    columns = card_columns(comparison)
    titles = ("pictures of", *(f"{c.title} {'↑' if c.higher else '↓'}" for c in columns))
    dense = ("16 bit", *(show_mean(c.original) for c in columns))
    return titles, (dense, ("packed", *(show_mean(c.packed) for c in columns)))


def card_columns(comparison: Comparison) -> list[CardColumn]:
    """Return the metrics and judges that were measured: those of sets and people first."""
    return [column for column in _measured(comparison) if column.packed.mean is not None]


def _measured(comparison: Comparison) -> Iterator[CardColumn]:
    for given in comparison.judgements:
        judge, higher = given.judge, given.judge.higher_is_better
        before = summarize(given.original) if given.original else None
        yield CardColumn(judge.name, judge.title, given.source, higher, before, given.summary)
    for name in _SHOWN:
        if score := comparison.scores.get(name):
            higher = score.metric.better is Better.HIGHER
            yield CardColumn(name, score.metric.title, score.backbone, higher, None, score.summary)
    if clip := comparison.clip:
        original, packed = clip.original.summary, clip.packed.summary
        yield CardColumn("clip", "CLIP score", clip.backbone, True, original, packed)
