"""The drawing of a sensitivity: predicted error of every layer under the treatments."""

from pathlib import Path
from typing import Any

from quantkit.errors import OutputError
from quantkit.sensitivity.error_propagation import find_gains
from quantkit.sensitivity.sensitivity_file import Sensitivity
from quantkit.sensitivity.treatments import ATTENTION_BY_NAME, SIXTEEN_BIT, TREATMENTS
from quantkit.storage.files import staged_file
from quantkit.storage.written import PROGRAM

#: What matplotlib writes here.
SUFFIXES = (".svg", ".png", ".pdf")

_COLOURS = ("#3f7fc1", "#2b8a5b", "#8fb8de", "#8cc7a6", "#cf4436", "#e08a3c", "#7b4fa3", "#b0884f")
_MARKS = "os^vDPX*"


def check_plot_path(path: Path) -> None:
    """Refuse a file name that no drawing can be written to.

    Raises:
        OutputError: another suffix.
    """
    if path.suffix not in SUFFIXES:
        raise OutputError(f"{path}: unknown kind of plot; end the name in {', '.join(SUFFIXES)}")


def save_plot(sensitivity: Sensitivity, path: Path, *, force: bool) -> None:
    """Draw local errors above and predicted shares of the final error below.

    Raises:
        OutputError: the file exists without ``force``, or its suffix is not drawn.
    """
    # Figure without pyplot: no global state, no display, safe in a program with plots of its own.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_plot_path(path)
    style = {"svg.hashsalt": "sensitivity", "svg.fonttype": "none", "font.size": 9,
             "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(9.0, 6.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        _draw(above, below, sensitivity)
        with staged_file(path, force=force) as stage:
            name = path.suffix.removeprefix(".")
            metadata: dict[str, str | None] = {"Software" if name == "png" else "Creator": PROGRAM}
            metadata |= {"Date": None} if name == "svg" else {}
            figure.savefig(stage, format=name, metadata=metadata, dpi=150)


def _draw(above: Any, below: Any, sensitivity: Sensitivity) -> None:
    gains = find_gains(sensitivity.layers)
    drawn = [t.name for t in TREATMENTS if t != SIXTEEN_BIT and t.packs]
    drawn += ATTENTION_BY_NAME
    for index, name in enumerate(drawn):
        rows = [
            (position, layer.outcomes[name].error, gains[layer.name])
            for position, layer in enumerate(sensitivity.layers, 1)
            if name in layer.outcomes and layer.outcomes[name].error > 0
        ]
        if not rows:
            continue
        places = [row[0] for row in rows]
        look = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKS[index % len(_MARKS)],
                "linestyle": "", "markersize": 4.0 if index % 2 == 0 else 2.5}  # fmt: skip
        above.plot(places, [error for _, error, _ in rows], label=name, **look)
        below.plot(places, [error * gain.value for _, error, gain in rows], **look)
    measured = [
        (position, layer.measured.error)
        for position, layer in enumerate(sensitivity.layers, 1)
        if layer.measured and layer.measured.error > 0
    ]
    if measured:
        below.plot(*zip(*measured, strict=True), "o", markersize=7, markerfacecolor="none",
                   color="#222222", label="measured in the pipeline")  # fmt: skip
        below.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
    for axes, title in ((above, "error of the layer's output (NMSE)"),
                        (below, "of the final latents (NMSE)")):  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylabel(title)
        axes.grid(axis="y", alpha=0.25)
    above.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
    below.set_xlabel(f"layer, in the order of the model (1 to {len(sensitivity.layers)})")
