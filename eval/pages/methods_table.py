"""The table of methods: several packed pipelines against one original, a row each."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quantkit.eval.judging.evaluation_result import Packing, Report
from quantkit.eval.judging.gates import State
from quantkit.eval.judging.noise_floor import FloorGap
from quantkit.eval.judging.serialize import gates_json, plain
from quantkit.eval.measuring.number_format import show, show_bytes, show_difference, show_mean
from quantkit.eval.measuring.pairs import (
    Pair,
    Side,
    look_first,
    pair_numbers,
    pair_values,
    sort_keys,
)
from quantkit.eval.measuring.sample_statistics import Summary
from quantkit.eval.pages.markdown import to_markdown
from quantkit.eval.pages.page import (
    Card,
    Cell,
    Gallery,
    Page,
    Part,
    Row,
    Section,
    Table,
    Text,
    Tile,
    state_style,
)
from quantkit.eval.pages.rendering import to_html
from quantkit.eval.pages.sections import SAME_BACKBONE, made_section
from quantkit.eval.pages.sentences import headline, lead
from quantkit.eval.pages.tiles import picture_tile, size_share

from quantkit.errors import InputError

#: 2: gates have a state, as in report.json.
SCHEMA_VERSION = 1
#: What the marker calls the output.
KIND = "comparison of reports"
COLUMNS = (
    "method", "recipe", "sparsity", "local error", "weights", "ratio", "SSIM", "LPIPS",
    "CLIP change", "PSNR", "gates", "computed by",
)  # fmt: skip
BRIEF_COLUMNS = ("method", "local error", "ratio", "SSIM", "LPIPS", "CLIP change", "gates")
#: Columns of words, which may break; the others hold numbers.
TEXT_COLUMNS = ("method", "recipe", "sparsity", "gates", "computed by")


@dataclass(frozen=True)
class Method:
    """One row: a packed pipeline and its report."""

    name: str
    report: Report
    #: folder of the report, relative to the page
    folder: str
    #: said on the page when a gate fails
    remark: str = ""
    #: mean over the masked layers of the share of their output's power that is lost; None: not told
    local_error: float | None = None


def name_methods(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return a name for every packed directory: its own, with parents where two are alike.

    Raises:
        InputError: a directory is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise InputError(f"{paths[index]}: given twice; name every packed directory once")
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = tuple("-".join(p.strip("/") for p in path.parts[-depth:]) for path in resolved)
        if len(set(names)) == len(names):
            return names
    raise AssertionError("distinct paths have distinct parts")


def headings(methods: Sequence[Method]) -> tuple[str, ...]:
    """Return the columns of the table, the networks' names beside their metrics."""
    comparison = methods[0].report.comparison
    lpips, clip = comparison.scores.get("lpips"), comparison.clip
    backbones = {"LPIPS": lpips and lpips.backbone, "CLIP change": clip and clip.backbone}
    return tuple(
        f"{column} [{backbones[column]}]" if backbones.get(column) else column for column in COLUMNS
    )


def cells(method: Method) -> tuple[str, ...]:
    """Return the row of a method, as ``headings`` names its columns."""
    report, packing = method.report, method.report.packing
    scores, clip = report.comparison.scores, report.comparison.clip
    return (
        method.name,
        packing.recipe or "-",
        _sparsity(packing),
        show(method.local_error),
        show_bytes(report.packed.nbytes),
        size_share(report),
        show_mean(scores["ssim"].summary),
        show_mean(scores["lpips"].summary) if "lpips" in scores else "-",
        "-" if clip is None else _clip_change(clip.change, clip.loss),
        show_mean(scores["psnr"].summary),
        judge_cell(report),
        report.computed_by or "torch",
    )


def brief_headings(methods: Sequence[Method]) -> tuple[str, ...]:
    """Return the columns of the short table."""
    return tuple(_brief(headings(methods)))


def brief_cells(method: Method) -> tuple[str, ...]:
    """Return the row of a method, as ``brief_headings`` names its columns: means alone."""
    return tuple(re.sub(r" \[[^]]*\]", "", cell) for cell in _brief(cells(method)))


def _brief(row: Sequence[str]) -> Iterator[str]:
    return (text for name, text in zip(COLUMNS, row, strict=True) if name in BRIEF_COLUMNS)


def _sparsity(packing: Packing) -> str:
    if not packing.sparse:
        return "dense"
    dropped = f"{100 * packing.pruned:.1f} % of the weights dropped"
    return f"2:4 in {packing.sparse} of {packing.layers} layers, {dropped}"


def judge_cell(report: Report) -> str:
    """Return what the gates show in a word, those that decide it by name."""
    # The network's name stands in the heading of its column.
    told = [gate.title.partition(" [")[0] for gate in report.gates if gate.state is report.state]
    if report.state is State.FAILED:
        return f"FAIL: {', '.join(told)}"
    if report.state is State.UNDECIDED:
        return f"undecided: {', '.join(told)}"
    return "pass" if report.passed else "not judged"


def best_first(methods: Sequence[Method]) -> list[Method]:
    """Return those that pass first, then open and failed ones; of each the highest SSIM first."""
    ranks = {State.PASSED: 0, State.NOT_JUDGED: 1, State.UNDECIDED: 1, State.FAILED: 2}

    def rank(method: Method) -> tuple[int, float]:
        mean = method.report.comparison.scores["ssim"].summary.mean
        return ranks[method.report.state], 1.0 if mean is None else -mean

    return sorted(methods, key=rank)


def write_methods(
    methods: Sequence[Method],
    folder: Path,
    commands: Sequence[str],
    *,
    title: str = "",
    facts: str = "",
) -> None:
    """Write index.html, methods.md and methods.json beside the reports' folders.

    On pages the best is first.

    Args:
        methods: made on one original, with the same prompts and seeds.
        folder: exists, and holds every method's folder.
        commands: what a reader types to make the page again.
        title: of a page that has its own.
        facts: of it, how pictures were made.
    """
    text = json.dumps(to_json(methods), indent=1, allow_nan=False, ensure_ascii=False)
    (folder / "methods.json").write_text(text + "\n", encoding="utf-8")
    page = _page(best_first(methods), folder, commands)
    if title:
        page = replace(page, title=title, heading=title, facts=facts)
    (folder / "methods.md").write_text(to_markdown(page), encoding="utf-8")
    (folder / "index.html").write_text(to_html(page), encoding="utf-8")


def _page(methods: Sequence[Method], folder: Path, commands: Sequence[str]) -> Page:
    first, pairs = methods[0].report, _pairs(methods, _picture_size(folder / methods[0].folder))
    by_index, run = {pair.index: pair for pair in pairs}, first.run
    return Page(
        title=f"{len(methods)} packed pipelines - quantkit",
        heading=f"{len(methods)} packed pipelines against one original",
        lead=_lead(methods),
        state="",
        facts=f"{len(run.prompts)} prompts, {run.steps} steps, same seeds, computed in {run.dtype} "
        f"on {run.device}.",
        tiles=tuple(map(_tile, methods)),
        # one machine, one cause: the same line would stand there once per method
        warnings=tuple(sorted({line for m in methods for line in m.report.warnings})),
        groups=look_first([pair.index for pair in pairs], by_index.__getitem__),
        wide=True,
        picks=tuple(method.name for method in methods),
        sections=_sections(methods, pairs, commands),
    )


def _sections(
    methods: Sequence[Method], pairs: tuple[Pair, ...], commands: Sequence[str]
) -> tuple[Section, ...]:
    first, count = methods[0].report, len(pairs)
    gallery = Gallery(pairs, sort_keys(first.comparison), wide=True)
    sorts, numbers = f"{count}, sorted and filtered by any metric", "every number with its interval"
    original = Text(f"Original: `{first.original.path}`")
    digest = f"quantkit {first.quantkit_version}, {first.created}"
    return (
        Section("pictures", "All prompts", (gallery,), sorts, f"All {count} prompts", open=True),
        Section("table", "Table of methods", _table(methods), numbers, "Table", open=True),
        Section("why", "Verdicts", tuple(map(_card, methods)), "in full"),
        made_section(commands, digest, before=(original,)),
    )


def _table(methods: Sequence[Method]) -> tuple[Part, ...]:
    first, titles = methods[0].report, headings(methods)
    numbers = [index for index, title in enumerate(titles) if title not in TEXT_COLUMNS]
    rows: tuple[Row, ...] = tuple((Cell(m.name, folder=m.folder), *cells(m)[1:]) for m in methods)
    floors = tuple(_floor_row(gap) for gap in first.noise_floor)
    note = (
        f"Means over {len(first.run.prompts)} prompts with 95 % bootstrap intervals. "
        f"{'The noise floor is what the original does to its own pictures. ' if floors else ''}"
        f"{SAME_BACKBONE}"
    )
    table = Table("Table of methods", titles, rows, numbers, floors, style="wide methods")
    return table, Text(note, "soft")


def _floor_row(gap: FloorGap) -> Row:
    """Return what the original does to its own pictures."""
    found, numbers = gap.floor.comparison, ["-"] * 4
    if found is not None:
        lpips, clip = found.scores.get("lpips"), found.clip
        numbers = [
            show_mean(found.scores["ssim"].summary),
            "-" if lpips is None else show_mean(lpips.summary),
            "-" if clip is None else _clip_change(clip.change, clip.loss),
            show_mean(found.scores["psnr"].summary),
        ]
    first = Cell(
        f"noise floor: the original with {gap.floor.title}",
        span=COLUMNS.index("SSIM"),
        style="words",
    )
    return (first, *numbers, Cell("", span=2))


def _card(method: Method) -> Card:
    report, failed = method.report, method.report.state is State.FAILED
    texts = (report.verdict, *([method.remark] if method.remark and failed else []))
    return Card(method.name, method.folder, state_style(report.state.value), texts)


def _lead(methods: Sequence[Method]) -> str:
    """Return in one sentence how many keep their gates, and which is the smallest of those."""
    good = [method for method in methods if method.report.passed]
    start = f"{len(good)} of {len(methods)} packed pipelines pass their gates"
    if not good:
        return f"{start}."
    least = min(good, key=lambda method: method.report.packed.nbytes)
    return f"{start}; the smallest of them is {least.name}, {size_share(least.report)} of the size."


def _tile(method: Method) -> Tile:
    """Return a method's size, its pictures, and what its gates say."""
    report, failed = method.report, method.report.state is State.FAILED
    notes = (
        lead(report.gates).partition(": ")[2],
        *([method.remark] if method.remark and failed else []),
    )
    return Tile(
        method.name,
        f"{size_share(report)}, {picture_tile(report.comparison).value}",
        notes,
        method.folder,
        state_style(report.state.value),
        headline(report.gates),
    )


def to_json(methods: Sequence[Method]) -> dict[str, Any]:
    """Return the table as JSON values; each report has its own file with everything."""
    first = methods[0].report
    return {
        "schema": "quantkit.methods",
        "schema_version": SCHEMA_VERSION,
        "original": plain(first.original),
        "prompts": len(first.run.prompts),
        "steps": first.run.steps,
        "dtype": first.run.dtype,
        "device": first.run.device,
        "methods": [_method_json(method) for method in methods],
    }


def _method_json(method: Method) -> dict[str, Any]:
    report = method.report
    scores, clip = report.comparison.scores, report.comparison.clip
    return {
        "name": method.name,
        "report": f"{method.folder}/report.json",
        "packed": plain(report.packed),
        "packing": plain(report.packing),
        "local_error": method.local_error,
        "ratio": report.packed.nbytes / report.original.nbytes,
        "metrics": {
            name: {"backbone": score.backbone or None, "summary": plain(score.summary)}
            for name, score in scores.items()
        },
        "clip": clip and {
            "backbone": clip.backbone, "change": plain(clip.change),
            "relative_loss_percent": plain(clip.loss),
        },
        "gates": gates_json(report.gates),
        "pictures": {kind.value: count for kind, count in report.pictures.counts.items()},
        "verdict": {
            "state": report.state.value, "passed": report.passed, "text": report.verdict,
        },
    }  # fmt: skip


def _clip_change(change: Summary, loss: Summary) -> str:
    """Return the change in %, with the interval; in points where the original has no score."""
    if loss.mean is None:
        return show_difference(change)
    # 0.0 - x and not -x: no loss at all is +0, not -0
    interval = loss.interval
    tail = f" [{0.0 - interval.high:+.3g}, {0.0 - interval.low:+.3g}]" if interval else ""
    return f"{0.0 - loss.mean:+.3g}{tail} %"


def _picture_size(report: Path) -> tuple[int, int]:
    """Return width and height of a report's pictures, in pixels."""
    from PIL import Image

    with Image.open(next((report / "images" / "original").iterdir())) as picture:
        return picture.width, picture.height


def _pairs(methods: Sequence[Method], size: tuple[int, int]) -> tuple[Pair, ...]:
    """Return the prompts, the one with the lowest SSIM of any method first."""
    values = [method.report.comparison.scores["ssim"].values for method in methods]
    names, run = methods[0].report.comparison.names, methods[0].report.run
    order = sorted(range(len(names)), key=lambda index: min(row[index] for row in values))
    return tuple(
        Pair(
            i,
            names[i],
            run.seeds[i],
            run.prompts[i],
            (_original(methods[0], i, size), *(_side(method, i, size) for method in methods)),
        )
        for i in order
    )


def _original(method: Method, index: int, size: tuple[int, int]) -> Side:
    name, prompt = method.report.comparison.names[index], method.report.run.prompts[index]
    src = f"{quote(method.folder)}/images/original/{quote(name)}.png"
    return Side("original", src, "", size, f"Original, pair {name}: {prompt}")


def _side(method: Method, index: int, size: tuple[int, int]) -> Side:
    comparison, prompt = method.report.comparison, method.report.run.prompts[index]
    name, ssim = comparison.names[index], show(comparison.scores["ssim"].values[index])
    return Side(
        method.name,
        f"{quote(method.folder)}/images/packed/{quote(name)}.png",
        "",
        size,
        f"{method.name}, pair {name}: {prompt}; SSIM {ssim}",
        pair_values(comparison, index),
        pair_numbers(comparison, index),
    )
