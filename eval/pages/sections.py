"""Sections that several pages have: pictures, metrics, and how a page was made."""

from collections.abc import Sequence
from itertools import chain

from quantkit.eval.judging.gates import Gate
from quantkit.eval.judging.noise_floor import FloorGap
from quantkit.eval.measuring.comparison import Comparison
from quantkit.eval.measuring.embedding import Pictures, Store
from quantkit.eval.measuring.number_format import show, show_difference, show_mean
from quantkit.eval.measuring.pairs import PairView, sort_keys
from quantkit.eval.measuring.sample_statistics import RESAMPLES
from quantkit.eval.pages.page import (
    Cell,
    Commands,
    Gallery,
    Heading,
    Part,
    Plot,
    Plots,
    Row,
    Section,
    Table,
    Text,
)
from quantkit.eval.pages.plots import plot_scores
from quantkit.eval.pages.tables import MetricRow, judges_table, metric_rows

#: Said wherever scores of networks stand.
SAME_BACKBONE = "LPIPS and CLIP numbers compare only with numbers of the same backbone."


def pictures_section(view: PairView, order: Sequence[int], store: Store, *, note: bool) -> Section:
    """Return the list of all pairs.

    Args:
        view: the pairs.
        order: their positions, the worst first.
        store: their pictures, when the page holds them.
        note: say what the pictures are that open.
    """
    pairs = tuple(view.listed(index) for index in order)
    opened = _what_opens(view, store) if note else ""
    return Section(
        "pictures",
        "All pairs",
        (Gallery(pairs, sort_keys(view.comparison), note=opened),),
        digest=f"{len(pairs)}, sorted and filtered by any metric",
        link=f"All {len(pairs)} pairs",
        open=True,
    )


def _what_opens(view: PairView, store: Store) -> str:
    if view.pictures is Pictures.BESIDE:
        return "The pictures are the measured files in `images/`."
    if not store.lossy:
        return (
            "The pictures that open are the measured ones, without loss; as PNG they are in "
            "`images/`."
        )
    return (
        f"The pictures that open are WebP of quality {store.quality}; the measured ones are in "
        "`images/`, and the differences were taken from those."
    )


def made_section(
    lines: Sequence[str],
    digest: str,
    *,
    before: tuple[Part, ...] = (),
    after: tuple[Part, ...] = (),
    over: bool = True,
) -> Section:
    """Return the commands that make a page again, and what else belongs there.

    Args:
        lines: the commands.
        digest: by what and when.
        before: the commands.
        after: the commands.
        over: the job is done.
    """
    title = "How it was made" if over else "How it is made"
    return Section("made", title, (*before, Commands(tuple(lines)), *after), digest)


def metrics_section(
    comparison: Comparison,
    gate: Gate | None,
    gaps: tuple[FloorGap, ...] = (),
    *,
    unit: str = "pair",
) -> Section:
    """Return means, noise floors, other judges, spread, and the plot of SSIM.

    Args:
        comparison: what was measured.
        gate: of SSIM.
        gaps: what the original does to its own pictures.
        unit: what a bar of the plot is.
    """
    rows = metric_rows(comparison, gaps)
    notes = [
        Text(f"Noise floor, {gap.floor.title}: {gap.floor.note}.", "warning")
        for gap in gaps
        if gap.floor.note
    ]
    floor = next((gap.floor for gap in gaps if gap.floor.comparison), None)
    ssim = plot_scores(comparison.scores["ssim"], gate, comparison.names, floor)
    judges: tuple[Part, ...] = ()
    if comparison.judgements:
        heading = Heading("Other judges", "no gate is on them")
        judges = (heading, judges_table(comparison, gaps))
    caption = f"SSIM of every {unit}, worst first{', with mean and gate' if gate else ''}."
    parts = (
        _means(rows, gaps),
        *notes,
        Text(_how_counted(comparison, rows, gaps), "soft"),
        *judges,
        _spread(rows),
        Plots((Plot(ssim, caption),)),
    )
    digest = "means with intervals, and the noise floor" if gaps else "means with intervals"
    return Section("metrics", "Metrics", parts, digest)


def _means(rows: Sequence[MetricRow], gaps: tuple[FloorGap, ...]) -> Table:
    floors = ((f"Noise floor: {gap.floor.title}", "Packed - floor") for gap in gaps)
    titles = ("Metric", "Packed", *chain.from_iterable(floors))
    return Table("Metrics", titles, tuple(map(_mean, rows)), numbers=range(1, len(titles)))


def _mean(metric: MetricRow) -> Row:
    shown = show_difference if metric.signed else show_mean
    backbone = f"{metric.backbone}, " if metric.backbone else ""
    label = Cell(metric.label, f"{backbone}{metric.better} is better")
    floors: list[Cell | str] = []
    for floor in metric.floors:
        standing = floor.standing.value if floor.standing else ""
        floors += [shown(floor.value), Cell(show_difference(floor.difference), below=standing)]
    return (label, shown(metric.summary), *floors)


def _how_counted(
    comparison: Comparison, rows: Sequence[MetricRow], gaps: tuple[FloorGap, ...]
) -> str:
    methods = {r.summary.interval.method for r in rows if r.summary.interval is not None}
    floor = (
        "The noise floor is the original against itself: every number beside the packed one is "
        "what the original does to its own pictures, and the difference is paired by prompt. "
    )
    return (
        f"Means over {len(comparison.names)} pairs with 95 % bootstrap intervals ({RESAMPLES} "
        f"resamples of pairs; {', '.join(sorted(methods)) or 'none'}). {floor if gaps else ''}"
        f"{SAME_BACKBONE}"
    )


def _spread(rows: Sequence[MetricRow]) -> Table:
    lines = (
        (row.label, *map(show, (s.std, s.minimum, s.median, s.maximum)), s.note or "-")
        for row in rows
        for s in (row.summary,)
    )
    titles = ("Metric", "Std", "Min", "Median", "Max", "Note")
    return Table("Spread over the pairs", titles, tuple(lines), numbers=range(1, 5))
