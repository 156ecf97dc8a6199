"""Figures of an evaluation in the model card of the packed directory."""

from pathlib import Path
from typing import Any

from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.pages.markdown import escape_markdown
from quantkit.eval.pages.tables import card_columns, card_rows

from quantkit.checkpoint.filelist import CARD
from quantkit.packing.card import MARKS
from quantkit.storage.files import rewritten_file


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
    columns = card_columns(report.comparison)
    card: Any = ModelCard(text, ignore_metadata_errors=True)
    before, _, rest = card.text.partition(start)
    card.text = f"{before}{start}\n{_section(report)}\n{end}{rest.partition(end)[2]}"
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


def _section(report: Report) -> str:
    titles, rows = card_rows(report.comparison)
    rows = (titles, ("---", *["---:"] * (len(titles) - 1)), *rows)
    sources = [f"{c.title}: {c.source}" for c in card_columns(report.comparison) if c.source]
    table = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)
    told = f"Means and 95 % bootstrap intervals, {_circumstances(report)}"
    note = "; ".join([told, *sources])
    return f"{escape_markdown(report.verdict)}\n\n{table}\n\n{escape_markdown(note)}."


def _cell(text: str) -> str:
    return text if set(text) <= {"-", ":"} else escape_markdown(text)


def _circumstances(report: Report) -> str:
    run = report.run
    return f"{len(run.prompts)} prompts, {run.steps} steps, the same seeds, {run.dtype}"
