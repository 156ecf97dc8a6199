"""Figures of an evaluation in the model card of the packed directory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.measuring.metrics import Better
from quantkit.eval.measuring.number_format import show_mean
from quantkit.eval.measuring.sample_statistics import Summary, summarize
from quantkit.eval.pages.markdown import escape_markdown

from quantkit.checkpoint.filelist import CARD
from quantkit.packing.card import MARKS
from quantkit.storage.files import rewritten_file

#: Metrics of pairs that the card shows.
_SHOWN = ("ssim", "lpips", "psnr")


@dataclass(frozen=True)
class _Column:
    """A metric or judge; None where the original by itself has no such number."""

    name: str
    title: str
    #: the network behind the number, or whose weights; empty when there is none
    source: str
    higher: bool
    original: Summary | None
    packed: Summary


def update_card(folder: Path, report: Report) -> bool:
    """Put the figures of a report into the card that packing wrote.

    Args:
        folder: the packed directory.
        report: of its evaluation.

    Returns:
        False where there is no such card: none, a link, or one that has lost the section's marks.

    Raises:
        OutputError: it cannot be written.
    """
    from huggingface_hub import EvalResult, ModelCard

    path, (start, end) = folder / CARD, MARKS
    if path.is_symlink() or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    if start not in text or end not in text.partition(start)[2]:
        return False
    columns = [c for c in _columns(report) if c.packed.mean is not None]
    card: Any = ModelCard(text, ignore_metadata_errors=True)
    before, _, rest = card.text.partition(start)
    card.text = f"{before}{start}\n{_section(report, columns)}\n{end}{rest.partition(end)[2]}"
    card.data.model_name = card.data.model_name or folder.resolve().name
    task = card.data.pipeline_tag or "text-to-image"
    card.data.eval_results = [
        EvalResult(
            task_type=task,
            dataset_type="prompts",
            dataset_name=_circumstances(report),
            metric_type=column.name,
            metric_name=column.title,
            metric_value=column.packed.mean,
        )
        for column in columns
    ]
    with rewritten_file(path) as stage:
        card.save(stage)
    return True


def _columns(report: Report) -> Iterator[_Column]:
    found = report.comparison
    for name in _SHOWN:
        if score := found.scores.get(name):
            higher = score.metric.better is Better.HIGHER
            yield _Column(name, score.metric.title, score.backbone, higher, None, score.summary)
    if clip := found.clip:
        original, packed = clip.original.summary, clip.packed.summary
        yield _Column("clip", "CLIP score", clip.backbone, True, original, packed)
    for given in found.judgements:
        if given.packed:
            judge, higher = given.judge, given.judge.higher_is_better
            before = summarize(given.original) if given.original else None
            yield _Column(judge.name, judge.title, given.source, higher, before, given.summary)


def _section(report: Report, columns: list[_Column]) -> str:
    titles = [f"{c.title} {'↑' if c.higher else '↓'}" for c in columns]
    rows = (
        ("pictures of", *titles),
        ("---", *["---:"] * len(columns)),
        ("16 bit", *(show_mean(c.original) for c in columns)),
        ("packed", *(show_mean(c.packed) for c in columns)),
    )
    sources = [f"{c.title}: {c.source}" for c in columns if c.source]
    table = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)
    told = f"Means and 95 % bootstrap intervals, {_circumstances(report)}"
    note = "; ".join([told, *sources])
    return f"{escape_markdown(report.verdict)}\n\n{table}\n\n{escape_markdown(note)}."


def _cell(text: str) -> str:
    return text if set(text) <= {"-", ":"} else escape_markdown(text)


def _circumstances(report: Report) -> str:
    run = report.run
    return f"{len(run.prompts)} prompts, {run.steps} steps, the same seeds, {run.dtype}"
