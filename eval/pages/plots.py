"""The report's drawings, as SVG that follows the page's light or dark colours."""

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from math import isfinite
from typing import Any

from quantkit.eval.judging.evaluation_result import LayerRow
from quantkit.eval.judging.gates import Gate
from quantkit.eval.judging.noise_floor import Floor
from quantkit.eval.measuring.comparison import Score
from quantkit.eval.measuring.sample_statistics import Interval
from quantkit.eval.measuring.step_errors import StepErrors

#: Drawn in place of the page's text colour, which only the page knows.
_INK = "#010203"
_GOOD, _BAD, _PLAIN, _SOFT = "#2b8a5b", "#cf4436", "#3f7fc1", "#9aa5b1"
_ORANGE = "#d9822b"
#: Of the lines over steps: packed, then the noise floors. The dash tells them apart in print.
_LINES = ((_PLAIN, "-"), (_ORANGE, "--"), (_SOFT, ":"))
#: More prompts than this are drawn without their names.
_NAMED = 40


def plot_scores(
    score: Score, gate: Gate | None, names: Sequence[str], floor: Floor | None = None
) -> str:
    """Return one bar per prompt, worst first, with the mean, its interval, gate and noise floor."""
    name = score.metric.name
    order = sorted(range(len(score.values)), key=lambda i: score.values[i])
    values = [score.values[i] for i in order]

    def draw(axes: Any) -> None:
        limit = gate.limit if gate else None
        colours = [_SOFT if limit is None else _GOOD if v > limit else _BAD for v in values]
        axes.bar(range(len(values)), values, color=colours, width=0.75)
        if floor is not None and floor.comparison is not None:
            marks = [floor.comparison.scores[name].values[i] for i in order]
            axes.plot(range(len(values)), marks, "_", color=_ORANGE, label=floor.title)
        axes.set_ylim(max(-1.0, min([*values, limit or 1.0]) - 0.05), 1.0)
        shown = [names[i] for i in order] if len(values) <= _NAMED else [""] * len(values)
        axes.set_xticks(range(len(values)), shown, rotation=90)
        axes.set_ylabel(score.metric.title)
        axes.set_xlabel("prompt, worst first")
        _mark_mean(axes, score.summary.mean, score.summary.interval)
        if limit is not None:
            axes.axhline(limit, color=_BAD, linestyle="--", linewidth=1.2, label=f"gate {limit:g}")
        _legend(axes)

    return _svg(draw, name=f"scores-{name}", height=2.9)


def plot_steps(lines: Mapping[str, StepErrors | None], *, name: str) -> str:
    """Return NMSE over steps, one line with a quartile band per run; log scale, zeros left out."""

    def draw(axes: Any) -> None:
        for (label, errors), (colour, dash) in zip(lines.items(), _LINES, strict=False):
            if errors is None:
                continue
            bands = (errors.quantile(0.25), errors.mean, errors.quantile(0.75))
            rows = [
                (step, *row)
                for step, row in enumerate(zip(*bands, strict=True), 1)
                if min(row) > 0.0 and isfinite(max(row))
            ]
            text = label if rows else f"{label}: identical"
            steps, low, mean, high = zip(*rows, strict=True) if rows else ((),) * 4
            axes.plot(
                steps, mean, color=colour, linestyle=dash, marker=".", markersize=4, label=text
            )
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        _log_scale(axes)
        axes.set_ylabel("NMSE")
        axes.set_xlabel("denoising step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, columns=1)

    return _svg(draw, name=name, height=3.2)


def plot_course(
    steps: Sequence[int], values: Sequence[float], *, title: str, name: str, log: bool
) -> str:
    """Return one line over training steps; what is not finite is left out."""

    def draw(axes: Any) -> None:
        shown = [(s, v) for s, v in zip(steps, values, strict=True) if isfinite(v)]
        if shown:
            axes.plot(*zip(*shown, strict=True), color=_PLAIN, marker=".", markersize=4)
        if log:
            _log_scale(axes)
        axes.set_ylabel(title)
        axes.set_xlabel("training step")
        axes.xaxis.get_major_locator().set_params(integer=True)

    return _svg(draw, name=name, height=2.9)


def _log_scale(axes: Any) -> None:
    """Set it where something is drawn: of nothing, matplotlib knows no logarithm."""
    if any(len(line.get_ydata()) for line in axes.lines):
        axes.set_yscale("log")


def plot_layer_errors(layers: Sequence[LayerRow]) -> str:
    """Return weight and output error of every packed layer, in the order of the model."""
    rows = [row for row in layers if row.weight_error is not None]

    def draw(axes: Any) -> None:
        for values, colour, label in (
            ([row.weight_error for row in rows], _SOFT, "weight"),
            ([row.output_error for row in rows], _PLAIN, "output on real inputs"),
            ([row.deviation for row in rows], _GOOD, "kernel against reference"),
        ):
            shown = [(i, v) for i, v in enumerate(values, 1) if v]
            if shown:
                axes.plot(*zip(*shown, strict=True), ".", color=colour, markersize=6, label=label)
        _log_scale(axes)
        axes.set_ylabel("relative error")
        axes.set_xlabel(f"packed layer, in the order of the model (1 to {len(rows)})")
        _legend(axes)

    return _svg(draw, name="errors", height=2.9)


def _mark_mean(axes: Any, mean: float | None, interval: Interval | None) -> None:
    if mean is not None:
        axes.axhline(mean, color=_INK, linewidth=1.2, zorder=3, label=f"mean {mean:.4f}")
    if interval is not None:
        axes.axhspan(
            interval.low, interval.high, color=_INK, alpha=0.15, zorder=0, label="95 % interval"
        )


def _legend(axes: Any, *, columns: int = 3) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, labelcolor=_INK
        )


def _svg(draw: Callable[[Any], None], *, name: str, height: float) -> str:
    # Figure without pyplot: no global state, no display, safe beside a program's own plots.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif",
        "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
        "axes.edgecolor": _INK, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        draw(axes)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    # Several drawings stand in one page, and matplotlib names the parts of each alike.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
    return svg.replace(_INK, "currentColor")
