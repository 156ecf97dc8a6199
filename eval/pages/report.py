"""Writing a report: pictures, report.json, report.md and report.html."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.measuring.embedding import Pictures, Store, store_pictures
from quantkit.eval.measuring.pairs import PairView, look_first, sort_keys
from quantkit.eval.measuring.pictures import GAIN, Pairs, save_png
from quantkit.eval.measuring.sample_statistics import RESAMPLES
from quantkit.eval.pages.network_map import map_network, worst_layers
from quantkit.eval.pages.plots import plot_layer_errors, plot_scores, plot_steps
from quantkit.eval.pages.rendering import render
from quantkit.eval.pages.sentences import headline, kernel_sentence, lead
from quantkit.eval.pages.tables import judge_rows, metric_rows, step_rows
from quantkit.eval.pages.tiles import report_tiles, size_share

from quantkit.storage.files import staged_directory

if TYPE_CHECKING:
    from quantkit.eval.measuring.step_errors import StepErrors

#: What the marker calls the output.
KIND = "report"
#: More prompts than this are not in report.md: it would be a page of pictures.
MARKDOWN_COUNT = 24

LAYER_COLUMNS = (
    ("#", "n"), ("Layer", ""), ("Kind", ""), ("Shape", ""), ("Format", ""), ("Weight error", "n"),
    ("Output error", "n"), ("Kernel deviation", "n"), ("Bytes before", "n"), ("After", "n"),
    ("Backend", ""),
)  # fmt: skip


def write_report(
    report: Report,
    pairs: Pairs,
    output: Path,
    *,
    force: bool,
    pictures: Pictures = Pictures.INSIDE,
) -> None:
    """Write the directory ``output`` at once: report.json, .md, .html and images/.

    Args:
        report: what the pages say.
        pairs: its pictures.
        output: the directory.
        force: replace one that exists.
        pictures: whether report.html holds its pictures, or shows those in images/.

    Raises:
        OutputError: it exists without ``force``, or cannot be written.
    """
    with staged_directory(output, kind=KIND, force=force) as stage:
        save_pairs(pairs, stage / "images")
        values = _template_values(report, pairs, pictures)
        text = json.dumps(report.to_json(), indent=1, allow_nan=False, ensure_ascii=False)
        (stage / "report.json").write_text(text + "\n", encoding="utf-8")
        for name in ("report.md", "report.html"):
            page = render(f"{name}.j2", {"report": report, **values})
            (stage / name).write_text(page, encoding="utf-8")


def save_pairs(pairs: Pairs, folder: Path) -> None:
    """Write the measured pictures as PNG, the sides in a folder each."""
    for side, pictures in (("original", pairs.original), ("packed", pairs.packed)):
        for name, picture in zip(pairs.names, pictures, strict=True):
            save_png(picture, folder / side / f"{name}.png")


def picture_values(view: PairView, store: Store, order: Sequence[int]) -> dict[str, Any]:
    """Return what the templates of pictures want, of one report or of two folders.

    Args:
        view: the pairs.
        store: their pictures, when the page holds them.
        order: positions of the pairs, the worst first.
    """
    return {
        "groups": look_first(order, view.first),
        "pairs": [view.listed(index) for index in order],
        "sort_keys": sort_keys(view.comparison),
        "store": store,
        "gain": GAIN,
        "inside": view.pictures is Pictures.INSIDE,
    }


def _template_values(report: Report, pairs: Pairs, pictures: Pictures) -> dict[str, Any]:
    rows = metric_rows(report.comparison, report.noise_floor)
    intervals = [row.summary.interval for row in rows if row.summary.interval is not None]
    store = store_pictures(pairs) if pictures is Pictures.INSIDE else Store()
    view = PairView(pairs, report.comparison, report.run.seeds, pictures, store.lossy)
    return {
        **picture_values(view, store, report.pictures.order),
        "headline": headline(report.gates),
        "lead": lead(report.gates),
        "tiles": report_tiles(report),
        "ratio": size_share(report),
        "packed_layers": report.packing.packed,
        "kernel_sentence": kernel_sentence(report),
        "metrics": rows,
        "judges": judge_rows(report.comparison, report.noise_floor),
        "interval_methods": ", ".join(sorted({row.method for row in intervals})) or "none",
        "resamples": RESAMPLES,
        "markdown_count": MARKDOWN_COUNT,
        "plots": _plots(report),
        "steps": step_rows(report.timesteps, report.noise_floor),
        "layer_columns": LAYER_COLUMNS,
        "network": map_network(report.layers),
        "worst_layers": worst_layers(report.layers),
        "noise_floor": report.noise_floor,
        "guidance": "of the pipeline" if report.run.guidance is None else report.run.guidance,
    }


def _plots(report: Report) -> dict[str, list[dict[str, str]]]:
    """Return the drawings by the section that they stand in."""
    scores, gates = report.comparison.scores, {gate.metric: gate for gate in report.gates}
    floor = next((gap.floor for gap in report.noise_floor if gap.floor.comparison), None)
    ssim = plot_scores(scores["ssim"], gates.get("ssim"), report.comparison.names, floor)
    layers = [] if report.quantized_by else [{
        "svg": plot_layer_errors(report.layers),
        "caption": "Relative error of every packed layer: weight, output, kernel.",
    }]  # fmt: skip
    return {
        "metrics": [
            {"svg": ssim, "caption": "SSIM of every prompt, worst first, with mean and gate."}
        ],
        "layers": layers,
        "steps": _step_plots(report),
    }


def _step_plots(report: Report) -> list[dict[str, str]]:
    divergence, local = report.timesteps.divergence, report.timesteps.local
    plots = []
    if divergence is not None:
        floors = {g.floor.title: g.floor.divergence for g in report.noise_floor}
        lines: dict[str, StepErrors | None] = {"packed": divergence, **floors}
        plots.append({
            "svg": plot_steps(lines, name="divergence"),
            "caption": "Divergence: NMSE between the latents of two runs from one noise, after "
            "every step; mean over prompts, the band from the lower to the upper quartile.",
        })  # fmt: skip
    if local is not None:
        plots.append({
            "svg": plot_steps({"packed": local}, name="local"),
            "caption": "Error of every step by itself: NMSE of the packed denoiser's answer on the "
            "original's own latents; mean and quartiles over the rows of the batch.",
        })  # fmt: skip
    return plots
