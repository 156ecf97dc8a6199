"""The page of two folders of pictures: what a report shows of them, without a model."""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from quantkit.eval.judging.gates import Gate, state_of
from quantkit.eval.measuring.comparison import Comparison
from quantkit.eval.measuring.embedding import Pictures, Store, store_pictures
from quantkit.eval.measuring.pairs import PairView
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.measuring.sample_statistics import RESAMPLES
from quantkit.eval.pages.plots import plot_scores
from quantkit.eval.pages.rendering import render
from quantkit.eval.pages.report import picture_values, save_pairs
from quantkit.eval.pages.sentences import lead
from quantkit.eval.pages.tables import metric_rows
from quantkit.eval.pages.tiles import comparison_tiles

from quantkit._version import __version__
from quantkit.storage.files import staged_directory

#: What the marker calls the output.
KIND = "comparison of pictures"


def write_images_page(
    comparison: Comparison,
    gates: tuple[Gate, ...],
    pairs: Pairs,
    output: Path,
    *,
    force: bool,
    pictures: Pictures,
    title: str,
    commands: Sequence[str],
    values: dict[str, Any],
) -> None:
    """Write the directory ``output`` at once: report.html, report.json and images/.

    Args:
        comparison: what was measured.
        gates: those that were asked for.
        pairs: the pictures.
        output: the directory.
        force: replace one that exists.
        pictures: whether the page holds its pictures, or shows those in images/.
        title: of the page.
        commands: what a reader types to make it again.
        values: of report.json.

    Raises:
        OutputError: it exists without ``force``, or cannot be written.
    """
    with staged_directory(output, kind=KIND, force=force) as stage:
        save_pairs(pairs, stage / "images")
        text = json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False)
        (stage / "report.json").write_text(text + "\n", encoding="utf-8")
        store = store_pictures(pairs) if pictures is Pictures.INSIDE else Store()
        view = PairView(pairs, comparison, (), pictures, store.lossy)
        page = _page_values(comparison, gates) | picture_values(
            view, store, comparison.worst_first()
        )
        page |= {"title": title, "lines": commands}
        (stage / "report.html").write_text(render("images.html.j2", page), encoding="utf-8")


def _page_values(comparison: Comparison, gates: tuple[Gate, ...]) -> dict[str, Any]:
    rows = metric_rows(comparison)
    intervals = [row.summary.interval for row in rows if row.summary.interval is not None]
    gate = next((gate for gate in gates if gate.metric == "ssim"), None)
    ssim = plot_scores(comparison.scores["ssim"], gate, comparison.names)
    return {
        "lead": lead(gates) if gates else _without_gates(comparison),
        "state": state_of(gates).value,
        "gates": gates,
        "tiles": comparison_tiles(comparison),
        "metrics": rows,
        "judges": (),
        "noise_floor": (),
        "resamples": RESAMPLES,
        "interval_methods": ", ".join(sorted({row.method for row in intervals})) or "none",
        "plots": {"metrics": [{"svg": ssim, "caption": "SSIM of every pair, worst first."}]},
        "version": __version__,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _without_gates(comparison: Comparison) -> str:
    count = len(comparison.names)
    return f"{count} pair{'s' * (count > 1)} measured; no gate was asked for."
