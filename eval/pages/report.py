"""Writing a report: pictures, report.json, report.md and report.html."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.measuring.embedding import Pictures, Store, store_pictures
from quantkit.eval.measuring.number_format import show
from quantkit.eval.measuring.pairs import PairView, look_first
from quantkit.eval.measuring.pictures import Pairs, save_png
from quantkit.eval.pages.layer_sections import attention_section, layers_section
from quantkit.eval.pages.markdown import to_markdown
from quantkit.eval.pages.page import (
    Cell,
    Heading,
    Page,
    Part,
    Plot,
    Plots,
    Row,
    Section,
    Table,
    Text,
    state_style,
)
from quantkit.eval.pages.plots import plot_steps
from quantkit.eval.pages.rendering import to_html
from quantkit.eval.pages.sections import made_section, metrics_section, pictures_section
from quantkit.eval.pages.sentences import headline, kernel_sentence, lead
from quantkit.eval.pages.tables import gates_table
from quantkit.eval.pages.tiles import report_tiles

from quantkit.storage.files import staged_directory

#: What the marker calls the output.
KIND = "report"


def write_report(
    report: Report,
    pairs: Pairs,
    output: Path,
    *,
    force: bool,
    pictures: Pictures = Pictures.INSIDE,
    indexed: bool = False,
) -> None:
    """Write the directory ``output`` at once: report.json, .md, .html and images/.

    Args:
        report: what the pages say.
        pairs: its pictures.
        output: the directory.
        force: replace one that exists.
        pictures: whether report.html holds its pictures, or shows those in images/.
        indexed: whether an index.html stands in the folder above.

    Raises:
        OutputError: it exists without ``force``, or cannot be written.
    """
    with staged_directory(output, kind=KIND, force=force) as stage:
        save_pairs(pairs, stage / "images")
        text = json.dumps(report.to_json(), indent=1, allow_nan=False, ensure_ascii=False)
        (stage / "report.json").write_text(text + "\n", encoding="utf-8")
        page = replace(report_page(report, pairs, pictures), indexed=indexed)
        (stage / "report.md").write_text(to_markdown(page), encoding="utf-8")
        (stage / "report.html").write_text(to_html(page), encoding="utf-8")


def save_pairs(pairs: Pairs, folder: Path) -> None:
    """Write the measured pictures as PNG, the sides in a folder each."""
    for side, pictures in (("original", pairs.original), ("packed", pairs.packed)):
        for name, picture in zip(pairs.names, pictures, strict=True):
            save_png(picture, folder / side / f"{name}.png")


def report_page(report: Report, pairs: Pairs, pictures: Pictures) -> Page:
    """Return the page of a report."""
    store = store_pictures(pairs) if pictures is Pictures.INSIDE else Store()
    view = PairView(pairs, report.comparison, report.run.seeds, pictures, store.lossy)
    return Page(
        title=f"{report.title} - quantkit report",
        heading=report.title,
        lead=lead(report.gates),
        state=state_style(report.state.value),
        tiles=report_tiles(report),
        warnings=report.warnings,
        groups=look_first(report.pictures.order, view.first),
        sections=tuple(_sections(report, view, store)),
        store=store,
    )


def _sections(report: Report, view: PairView, store: Store) -> Iterator[Section]:
    gates = {gate.metric: gate for gate in report.gates}
    yield pictures_section(view, report.pictures.order, store, note=True)
    yield _verdict(report)
    yield metrics_section(report.comparison, gates.get("ssim"), report.noise_floor, unit="prompt")
    if report.layers:
        yield layers_section(report)
    if report.attention_formats:
        yield attention_section(report)
    yield _steps(report)
    yield _kernels(report)
    yield _made(report)


def _verdict(report: Report) -> Section:
    advice = [
        Text(f"{step.what}{f': `{step.command}`' if step.command else ''}")
        for step in report.next_steps
    ]
    table = gates_table(report.gates)
    parts: tuple[Part, ...] = (
        Text(report.verdict),
        *([Heading("What to do next")] * bool(advice)),
        *advice,
        table,
    )
    return Section("why", "Verdict", parts, headline(report.gates))


def _steps(report: Report) -> Section:
    steps, gaps = report.timesteps, report.noise_floor
    runs = (steps.divergence, steps.local, *(gap.floor.divergence for gap in gaps))
    titles = (
        "Step", "Timestep", "Divergence", "Local error",
        *(f"Divergence: {gap.floor.title}" for gap in gaps),
    )  # fmt: skip
    measured = steps.local or steps.divergence
    rows = tuple(
        (str(i + 1), show(step), *("-" if run is None else show(run.mean[i]) for run in runs))
        for i, step in enumerate(measured.timesteps if measured else ())
    )
    table = Table("Error over the steps", titles, rows, range(len(titles)), style="")
    note = Text(f"NMSE after every step, mean over prompts; {steps.note}.", "soft")
    parts: tuple[Part, ...] = (Plots(tuple(_step_plots(report))), *([table] * bool(rows)), note)
    return Section("steps", "Error over the steps", parts, steps.note, link="Steps")


def _step_plots(report: Report) -> Iterator[Plot]:
    divergence, local = report.timesteps.divergence, report.timesteps.local
    if divergence is not None:
        floors = {g.floor.title: g.floor.divergence for g in report.noise_floor}
        yield Plot(
            plot_steps({"packed": divergence, **floors}, name="divergence"),
            "Divergence: NMSE between the latents of two runs from one noise, after every step; "
            "mean over prompts, the band from the lower to the upper quartile.",
        )
    if local is not None:
        yield Plot(
            plot_steps({"packed": local}, name="local"),
            "Error of every step by itself: NMSE of the packed denoiser's answer on the original's "
            "own latents; mean and quartiles over the rows of the batch.",
        )


def _kernels(report: Report) -> Section:
    rows = tuple(
        (call.op, Cell(call.variant, style="code"), call.backend, str(call.count))
        for call in report.kernels.calls
    )
    titles = ("Operation", "Variant", "Backend", "Calls")
    table = Table("Kernel calls", titles, rows, numbers=(3,), style="")
    parts: tuple[Part, ...] = (Text(kernel_sentence(report)), *([table] * bool(rows)))
    return Section("kernels", "Kernels", parts, report.computed_by or "none")


def _made(report: Report) -> Section:
    run = report.run
    guidance = "of the pipeline" if run.guidance is None else run.guidance
    told = Text(
        f"The packed pipeline against its original on {len(run.prompts)} prompts, same seeds, "
        f"{run.steps} steps, both computed in {run.dtype} on {run.device}."
    )
    generation = (
        f"{len(run.prompts)} prompts, seeds {run.seeds[0]} to {run.seeds[-1]}, {run.steps} steps, "
        f"guidance {guidance}, {run.batch} at a time"
    )
    seconds = (
        f"original {run.original_seconds:.1f} s, packed {run.packed_seconds:.1f} s; "
        f"{run.timing_note}"
    )
    files = (("original", report.original), ("packed", report.packed))
    rows: tuple[Row, ...] = (
        *((n, Cell(f.path, f"weights SHA-256 `{f.digest}`", style="code")) for n, f in files),
        ("generation", generation),
        ("time", seconds),
        *report.environment,
    )
    digest = f"quantkit {report.quantkit_version}, {report.created}"
    circumstances = Table("Circumstances", (), rows, style="")
    return made_section(report.commands, digest, before=(told,), after=(circumstances,))
