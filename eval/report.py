"""Writing a report: pictures, report.json, report.md and one self-contained report.html."""

import base64
import html
import io
import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from quantkit.storage.files import staged_directory

from .gates import Gate, State
from .images import GAIN, Pairs, Pixels, amplified_difference, save_png
from .number_format import show, show_bytes, show_difference, show_interval, show_mean
from .plots import plot_bytes, plot_layer_errors, plot_scores, plot_steps
from .result import Report
from .statistics import RESAMPLES
from .tables import metric_rows, step_rows

if TYPE_CHECKING:
    from .step_errors import StepErrors

#: What the marker calls the output.
KIND = "report"
#: Larger pictures are embedded shrunk to this side: three of 1024x1024 would be 5 MB a prompt.
EMBED_SIDE = 384
#: More prompts than this are in images/ only.
EMBED_COUNT = 24

LAYER_COLUMNS = (
    ("#", "n"), ("Layer", ""), ("Kind", ""), ("Shape", ""), ("Format", ""), ("Weight error", "n"),
    ("Output error", "n"), ("Kernel deviation", "n"), ("Bytes before", "n"), ("After", "n"),
    ("Backend", ""),
)  # fmt: skip


@dataclass(frozen=True)
class PictureRow:
    """One prompt of the picture grid; the pictures are data URIs."""

    name: str
    seed: int
    prompt: str
    ssim: float
    numbers: str
    css: str
    original: str
    packed: str
    difference: str


def write_report(report: Report, pairs: Pairs, output: Path, *, force: bool) -> None:
    """Write the directory ``output`` at once: report.json, .md, .html and images/.

    Raises:
        OutputError: it exists without ``force``, or cannot be written.
    """
    with staged_directory(output, kind=KIND, force=force) as stage:
        for side, pictures in (("original", pairs.original), ("packed", pairs.packed)):
            for name, picture in zip(pairs.names, pictures, strict=True):
                save_png(picture, stage / "images" / side / f"{name}.png")
        values = _template_values(report, pairs)
        text = json.dumps(report.to_json(), indent=1, allow_nan=False, ensure_ascii=False)
        (stage / "report.json").write_text(text + "\n", encoding="utf-8")
        for name in ("report.md", "report.html"):
            page = render(f"{name}.j2", {"report": report, **values})
            (stage / name).write_text(page, encoding="utf-8")


def render(template: str, values: dict[str, Any]) -> str:
    """Return a page from ``templates/``; HTML is escaped, unknown names are errors."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantkit.eval", "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "show": show,
        "interval": show_interval,
        "mean": show_mean,
        "difference": show_difference,
        "mib": show_bytes,
        "seconds": lambda seconds: f"{seconds:.1f} s",
        "remark": gate_remark,
        "product": prod,
        "md": escape_markdown,
        "code": code_span,
        "line": lambda text: " ".join(str(text).split()),
    }
    assets = {name: _asset(environment, name) for name in ("style.css", "sort.js")}
    return environment.get_template(template).render(
        style=assets["style.css"], script=assets["sort.js"], **values
    )


#: What Markdown, its tables and GitHub's links of bare addresses read as more than a letter.
_MARKS = re.compile(r"[\\`*_{}\[\]|~$@]|:(?=//)|(?<=\bwww)\.")


def escape_markdown(text: object) -> str:
    """Return somebody else's text for one line of Markdown, which shows it as it is."""
    plain = html.escape(" ".join(str(text).split()), quote=False)
    return _MARKS.sub(r"\\\g<0>", plain)


def code_span(text: object) -> str:
    """Return somebody else's text between as many backquotes as it takes, for one line."""
    plain = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{space}{plain}{space}{fence}"


def gate_remark(gate: Gate) -> str:
    """Return what else there is to know about a gate."""
    more = ""
    if gate.state is State.UNDECIDED:
        number = f"about {gate.prompts_needed}" if gate.prompts_needed else "more than 10,000"
        more = f"{number} prompts would decide"
    return "; ".join(part for part in (gate.note, more) if part)


def headline(report: Report) -> str:
    """Return the verdict in as few words as are true."""
    if report.passed and any(gate.state is State.NOT_JUDGED for gate in report.gates):
        return "Passed what was measured."
    return f"{report.state.value.capitalize()}."


def kernel_sentence(report: Report) -> str:
    """Return which backends ran how often, and how far they were from reference."""
    kernels = report.kernels
    if report.quantized_by:
        return _tool_sentence(report)
    if not kernels.total:
        return "No packed layer ran."
    parts = [f"{count:,} on {backend}" for backend, count in kernels.by_backend.items()]
    if kernels.worst_deviation is None:
        return f"{kernels.total:,} calls: {', '.join(parts)}. {kernels.watched}"
    return (
        f"{kernels.total:,} calls: {', '.join(parts)}. Largest deviation from reference "
        f"{kernels.worst_deviation:.3g} of the rms, in {kernels.worst_layer} ({kernels.watched})."
    )


def _tool_sentence(report: Report) -> str:
    """Return which tool quantized what, and that quantkit neither computed nor checked it."""
    found: dict[str, list[str]] = {}
    for by in report.quantized_by:
        found.setdefault(by.words, []).append(by.component)
    parts = [f"{' and '.join(names)} by {words}" for words, names in found.items()]
    return (
        f"Quantized: {'; '.join(parts)}. The tool's own code loaded and computed it: no kernel of "
        "quantkit ran, and no layer was held against a reference."
    )


def picture_class(side: int) -> str:
    """Return the style of pictures whose longer side has so many pixels: small ones show them."""
    return "small" if side <= EMBED_SIDE // 2 else "large"


def _template_values(report: Report, pairs: Pairs) -> dict[str, Any]:
    order = report.pictures.order
    rows = metric_rows(report.comparison, report.noise_floor)
    intervals = [row.summary.interval for row in rows if row.summary.interval is not None]
    side = max(max(picture.shape[:2]) for picture in pairs.original)
    return {
        "headline": headline(report),
        "ratio": f"{100 * report.packed.nbytes / report.original.nbytes:.1f} %",
        "packed_layers": report.packing.packed,
        "backends": report.computed_by or "nothing",
        "kernel_sentence": kernel_sentence(report),
        "metrics": rows,
        "interval_methods": ", ".join(sorted({row.method for row in intervals})) or "none",
        "resamples": RESAMPLES,
        "pictures": [_picture(report, pairs, index) for index in order[:EMBED_COUNT]],
        "hidden": max(0, len(order) - EMBED_COUNT),
        "shrunk": side > EMBED_SIDE,
        "gain": GAIN,
        "plots": _plots(report),
        "steps": step_rows(report.timesteps, report.noise_floor),
        "layer_columns": LAYER_COLUMNS,
        "guidance": "of the pipeline" if report.run.guidance is None else report.run.guidance,
    }


def _plots(report: Report) -> list[dict[str, str]]:
    scores, gates = report.comparison.scores, {gate.metric: gate for gate in report.gates}
    floor = next((gap.floor for gap in report.noise_floor if gap.floor.comparison), None)
    ssim = plot_scores(scores["ssim"], gates.get("ssim"), report.comparison.names, floor)
    found = [
        {"svg": ssim, "caption": "SSIM of every prompt, worst first, with mean and gate."},
        {"svg": plot_bytes(report), "caption": "Weight files before and after."},
    ]
    if not report.quantized_by:
        found.insert(1, {
            "svg": plot_layer_errors(report.layers),
            "caption": "Relative error of every packed layer: weight, output, kernel.",
        })  # fmt: skip
    return _step_plots(report) + found


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


def _picture(report: Report, pairs: Pairs, index: int) -> PictureRow:
    comparison, original, packed = report.comparison, pairs.original[index], pairs.packed[index]
    numbers = [
        f"{score.metric.title}{f' [{score.backbone}]' if score.backbone else ''} "
        f"{show(score.values[index], score.metric.unit)}"
        for score in comparison.scores.values()
    ]
    if comparison.clip is not None:
        before, after = comparison.clip.original.values[index], comparison.clip.packed.values[index]
        numbers.append(f"CLIP [{comparison.clip.backbone}] {before:.2f} -> {after:.2f}")
    return PictureRow(
        name=pairs.names[index],
        seed=report.run.seeds[index],
        prompt=report.run.prompts[index],
        ssim=comparison.scores["ssim"].values[index],
        numbers=", ".join(numbers),
        css=picture_class(max(original.shape[:2])),
        original=_data_uri(original),
        packed=_data_uri(packed),
        difference=_data_uri(amplified_difference(original, packed)),
    )


def _data_uri(pixels: Pixels) -> str:
    image = Image.fromarray(pixels, "RGB")
    image.thumbnail((EMBED_SIDE, EMBED_SIDE))
    data = io.BytesIO()
    image.save(data, format="PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode("ascii")


def _asset(environment: Any, name: str) -> Any:
    from markupsafe import Markup

    source, _, _ = environment.loader.get_source(environment, name)
    return Markup(source)  # noqa: S704  the package's own file, not input
