"""Write the tables of estimated steps into docs/guides/benchmark.md, beside what was measured.

``python docs/measure_estimate.py`` writes all of them, in 20 minutes. What was measured stands in
docs/notes/results, in the files of RUNS; docs/notes/results.md has the command that wrote each. To
renew the tables, put new files in their place and run this again.

``python docs/measure_estimate.py CARD FILE...`` prints the rows of other files, by group, and
``python docs/measure_estimate.py products CARD FILE...`` what each operation's products take beside
what they took, which the shares of a card's peak (quantkit/bench/estimate/cards.py) are set by.

A model is estimated as its run built it, with a row for every contender that was timed. A step is
one of many in a row where a file has that, else one that was waited for.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click

from quantkit.bench.estimate.cards import Card, find_card
from quantkit.bench.estimate.estimate_figures import EstimateRow, Span
from quantkit.bench.estimate.estimate_step import estimate_step, kernels_of
from quantkit.bench.estimate.groups import PROFILED
from quantkit.bench.estimate.kernel_cost import time_kernels
from quantkit.bench.estimate.shape_models import trace_contender
from quantkit.bench.models.denoisers import DENOISERS, Denoiser
from quantkit.bench.models.model_contenders import MODEL_CONTENDERS, ModelContender
from quantkit.bench.models.model_result import ModelBenchSettings
from quantkit.bench.models.profiling import group_of
from quantkit.device.archs import arch_of_device
from quantkit.progress import silent

PAGE = Path(__file__).parent / "guides" / "benchmark.md"
RESULTS = Path(__file__).parent / "notes" / "results"
#: By card, the file of a run, what it is a run of, and the contenders that run as they did, or all.
RUNS = {
    "H200": (
        ("h200-sdxl-replayed.json", "SDXL", ()),
        ("h200-sdxl.json", "SDXL", ("fp8-static-compiled", "sparse-static-compiled")),
        ("h200-step-flux-quarter.json", "a quarter of FLUX", ()),
        ("h200-flux-quarter.json", "a quarter of FLUX", ("fp8-static-compiled",)),
    ),
    "H100": (("h100-step-sdxl.json", "SDXL", ()),),
}
#: Milliseconds on an H100 (docs/notes/kernels.md, whole models in integers), SDXL's and FLUX's;
#: None: its networks' first products have another end since.
H100: dict[str, tuple[float, float | None]] = {
    "f16-compiled": (33.58, 72.04),
    "fp8-static-compiled": (26.66, 55.38),
    "int8-static-compiled": (26.53, None),
    "w4a8-static-compiled": (27.78, None),
}
#: What an RX 9070 XT is estimated for.
RADEON = {
    "float16, compiled": "f16-compiled",
    "FP8, replayed": "fp8-static-replayed",
    "FP8, attention in FP8": "fp8-static-replayed-e4m3fn-attention",
    "2:4, replayed": "sparse-static-replayed",
    "2:4, attention in FP8": "sparse-static-replayed-e4m3fn-attention",
}
#: What every family is estimated for, on the same card.
FAMILIES = {
    "float16, compiled": "f16-compiled",
    "FP8, module by module": "fp8-static",
    "FP8, replayed": "fp8-static-replayed",
}
#: Families that are measured and estimated with guidance in one batch.
_TWO = ("sdxl", "sd15", "sd3", "pixart", "sana")
#: Gigabytes of its memory, and what a step needs beside weights.
MEMORY, BESIDE = 16, 1.5
_ATTENTION = re.compile(r"(.*)-(e4m3fn|int8)-attention")
Run = dict


def main() -> None:
    """Write the tables, or print those of files."""
    if len(sys.argv) == 1:
        page = PAGE.read_text(encoding="utf-8")
        for card in RUNS:
            page = _with_table(page, card, runs(card))
        page = _with_table(page, "H100 compiled", h100())
        page = _with_table(page, "9070", radeon())
        page = _with_table(page, "9070 families", families())
        PAGE.write_text(page, encoding="utf-8")
        return
    show, (card, *files) = rows_of, sys.argv[1:]
    if card == "products":
        show, (card, *files) = products_of, files
    for path in files:
        for cells in show(find_card(card), _read(Path(path)), Path(path).stem):
            click.echo(_line(cells))


def runs(name: str) -> list[str]:
    """Return the table of the runs on a card."""
    head = ("model", "contender", "estimate", "range", "measured", "ratio")
    card, lines = find_card(name), _head(head)
    for file, model, only in RUNS[name]:
        rows = rows_of(card, _read(RESULTS / file), model, only)
        lines += [_line(row[: len(head)]) for row in rows if "-fast" not in row[1]]
    return lines


def h100() -> list[str]:
    """Return the table of compiled models that were measured on H100s."""
    models = (DENOISERS["sdxl"], Denoiser(**_read(RESULTS / "h200-flux-quarter.json")["model"]))
    names = ("SDXL", "a quarter of FLUX")
    lines = _head(("contender", *(f"{name}: {of}" for name in names for of in _COLUMNS)))
    found = [_rows(find_card("H100"), model, list(H100)) for model in models]
    for name, measured in H100.items():
        each = zip((rows[name].ms for rows in found), measured, strict=True)
        lines.append(_line((name, *(cell for span, ms in each for cell in _against(span, ms)))))
    return lines


_COLUMNS = ("estimate", "measured", "ratio")


def _against(span: Span, ms: float | None) -> tuple[str, ...]:
    if ms is None:
        return _with_range(span), "-", "-"
    return _with_range(span), f"{ms:.1f}", f"{span.middle / ms:.2f}"


def radeon() -> list[str]:
    """Return the table of an RX 9070 XT."""
    card, names = find_card("gfx1201"), list(RADEON.values())
    sdxl = _rows(card, DENOISERS["sdxl"], names)
    flux = _rows(card, DENOISERS["flux"], names, ModelBenchSettings(1, 128))
    lines = _head(("", "SDXL, batch 2", "of float16", "weights, GB", "FLUX.1-dev, batch 1",
                   "of float16", "weights, GB"))  # fmt: skip
    for title, name in RADEON.items():
        cells = [cell for rows in (sdxl, flux) for cell in _told(rows, name)]
        lines.append(_line((title, *cells)))
    return lines


def families() -> list[str]:
    """Return the table of all denoisers on an RX 9070 XT."""
    lines = _head(("", "batch", *FAMILIES, "of float16"))
    for model in DENOISERS.values():
        batch = 2 if model.name in _TWO else 1
        settings = ModelBenchSettings(batch, 128)
        rows = _rows(find_card("gfx1201"), model, list(FAMILIES.values()), settings)
        times = [f"{rows[name].ms.middle:.0f}" for name in FAMILIES.values()]
        dense, packed = (rows[name].ms.middle for name in ("f16-compiled", "fp8-static-replayed"))
        lines.append(_line((model.name, str(batch), *times, f"{dense / packed:.2f}")))
    return lines


def _told(rows: dict[str, EstimateRow], name: str) -> tuple[str, str, str]:
    row, first = rows[name], rows["f16-compiled"]
    gigabytes = row.weight_bytes / 1e9
    fits = "" if gigabytes + BESIDE < MEMORY else ", more than it holds"
    times = f"{first.ms.middle / row.ms.middle:.2f}"
    return _with_range(row.ms), times, f"{gigabytes:.1f}{fits}"


def rows_of(card: Card, run: Run, model: str, only: tuple[str, ...] = ()) -> Iterator[tuple]:
    """Yield the cells of every contender that was timed and has an estimate."""
    measured = {row["contender"]: row for row in run["rows"] if row["timing"]}
    names = [name for name in measured if not only or name in only]
    found = _rows(card, Denoiser(**run["model"]), names, _settings(run))
    for name, row in found.items():
        taken, whole = _ms(measured[name]), f"{row.ms.low:.1f} to {row.ms.high:.1f}"
        yield (model, name, f"{row.ms.middle:.1f}", whole, f"{taken:.1f}",
               f"{row.ms.middle / taken:.2f}", *_beside(row, measured[name]))  # fmt: skip


def _beside(row: EstimateRow, measured: dict) -> Iterator[str]:
    profile = _profile(measured)
    for group in row.groups:
        taken = sum(profile.get(name, 0.0) for name in PROFILED[group.group])
        yield f"{group.ms.middle:.1f} ({taken:.1f})" if profile else f"{group.ms.middle:.1f}"


def _profile(measured: dict) -> dict[str, float]:
    """Return a profile, its kernels in the groups that they are in today."""
    profile = defaultdict(float, measured["profile"] or {})
    if not profile:
        return profile
    named = defaultdict(float)
    for kernel in measured.get("kernels") or ():
        named[group_of(kernel["name"])] += kernel["ms"]
    for group, ms in named.items():
        # What a group lacks of its kernels stood among the small ones when the profile was made.
        lacks = max(0.0, ms - profile[group])
        profile[group] += lacks
        profile["elementwise and copies"] -= lacks
    return profile


def products_of(card: Card, run: Run, model: str) -> Iterator[tuple]:
    """Yield what each operation's products take and took, by contender."""
    for measured in run["rows"]:
        contender = contender_of(measured["contender"])
        if contender is None or contender.torchao or not measured.get("kernels"):
            continue
        took = _took(measured["kernels"])
        for name, span in _takes(card, Denoiser(**run["model"]), contender, _settings(run)).items():
            if name in took:
                ratio = f"{span.middle / took[name]:.2f}"
                yield model, contender.name, name, _with_range(span), f"{took[name]:.2f}", ratio


def _took(kernels: list[dict]) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for kernel in kernels:
        if own := re.match(r"[a-z_]+_(fp8|int8|w4a8)(_sparse)?(_residual)?", kernel["name"]):
            found[own.group()] += kernel["ms"]
    return found


def _takes(
    card: Card, denoiser: Denoiser, contender: ModelContender, settings: ModelBenchSettings
) -> dict[str, Span]:
    traced = trace_contender(denoiser, contender, settings, arch_of_device(card.device))
    kernels = kernels_of(traced, settings, card)
    found = defaultdict(lambda: Span(0.0, 0.0))
    for low, high in zip(*(time_kernels(kernels, card, side) for side in (1, 0)), strict=True):
        found[low.kernel.names[0].partition(".")[2]] += Span(low.us / 1e3, high.us / 1e3)
    return found


def contender_of(name: str) -> ModelContender | None:
    """Return a contender, with its attention on codes where the name says so."""
    if quantized := _ATTENTION.fullmatch(name):
        plain = MODEL_CONTENDERS.get(quantized[1])
        return plain and plain.with_attention(quantized[2])
    return MODEL_CONTENDERS.get(name)


def _rows(
    card: Card, model: Denoiser, names: list[str], settings: ModelBenchSettings | None = None
) -> dict[str, EstimateRow]:
    known = [contender for name in names if (contender := contender_of(name))]
    settings = settings or ModelBenchSettings(2, 128)
    return {row.contender: row for row in estimate_step(model, known, settings, card, silent).rows
            if row.ms}  # fmt: skip


def _settings(run: Run) -> ModelBenchSettings:
    given = run["settings"]
    layout = {name: given[name] for name in ("channels_last", "fuse_projections")}
    return ModelBenchSettings(given["batch"], given["size"], **layout)


def _ms(measured: dict) -> float:
    return (measured.get("in_a_row") or measured["timing"])["p50_us"] / 1e3


def _with_range(span: Span) -> str:
    return f"{span.middle:.1f} ({span.low:.1f} to {span.high:.1f})"


def _read(path: Path) -> Run:
    return json.loads(path.read_text(encoding="utf-8"))


def _head(cells: tuple[str, ...]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _with_table(page: str, name: str, table: list[str]) -> str:
    """Return a page with a table in place of the one between its two marks."""
    start, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE}: no {start} and {end}")
    return f"{before}{start}\n{chr(10).join(table)}\n{end}{after}"


if __name__ == "__main__":
    main()
