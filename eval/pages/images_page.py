"""The page of two folders of pictures: what a report shows of them, without a model."""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from quantkit.eval.judging.gates import Gate, state_of
from quantkit.eval.measuring.comparison import Comparison
from quantkit.eval.measuring.embedding import Pictures, Store, store_pictures
from quantkit.eval.measuring.pairs import PairView, look_first
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.pages.page import Page, state_style
from quantkit.eval.pages.rendering import to_html
from quantkit.eval.pages.report import save_pairs
from quantkit.eval.pages.sections import made_section, metrics_section, pictures_section
from quantkit.eval.pages.sentences import lead
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
        page = _page(comparison, gates, pairs, pictures, title, commands)
        (stage / "report.html").write_text(to_html(page), encoding="utf-8")


def _page(  # noqa: PLR0917  what write_images_page was given
    comparison: Comparison,
    gates: tuple[Gate, ...],
    pairs: Pairs,
    pictures: Pictures,
    title: str,
    commands: Sequence[str],
) -> Page:
    store = store_pictures(pairs) if pictures is Pictures.INSIDE else Store()
    view, order = PairView(pairs, comparison, (), pictures, store.lossy), comparison.worst_first()
    gate = next((gate for gate in gates if gate.metric == "ssim"), None)
    created = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return Page(
        title=f"{title} - quantkit pictures",
        heading=title,
        lead=lead(gates) if gates else _without_gates(comparison),
        state=state_style(state_of(gates).value),
        tiles=comparison_tiles(comparison),
        groups=look_first(order, view.first),
        sections=(
            pictures_section(view, order, store, note=False),
            metrics_section(comparison, gate),
            made_section(commands, f"quantkit {__version__}, {created}"),
        ),
        store=store,
    )


def _without_gates(comparison: Comparison) -> str:
    count = len(comparison.names)
    return f"{count} pair{'s' * (count > 1)} measured; no gate was asked for."
