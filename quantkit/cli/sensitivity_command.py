"""``quantkit calibrate sensitivity``: the error of each layer under each treatment."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.storage.limits import MAX_COUNT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quantkit.sensitivity.error_propagation import Gain
    from quantkit.sensitivity.sensitivity_file import LayerSensitivity
    from quantkit.workflow.sensitivity import MeasuredSensitivity

#: Layers of the table on the terminal; the file has all.
SHOWN = 10
ORDERED_BY = "e4m3fn-token"
#: Treatments of the table, and their headings.
COLUMNS = {"e4m3fn-static": "static", "e4m3fn-token": "token", "2:4-wanda-e4m3fn-token": "2:4"}
#: The same of attention modules.
ATTENTION_COLUMNS = {
    "attention-e4m3fn": "e4m3fn",
    "attention-int8": "int8",
    "attention-e4m3fn-pv16": "e4m3fn, pv 16 bit",
    "attention-int8-pv16": "int8, pv 16 bit",
}


@click.command(
    "sensitivity",
    cls=Command,
    example="quantkit calibrate sensitivity sdxl -c sdxl.calibration -o sensitivity.json",
)
@options.model
@click.option(
    "-c",
    "--calibration",
    type=options.PATH,
    required=True,
    help="Statistics and stored inputs, written by 'quantkit calibrate model'.",
)
@options.hessians
@options.recipe
@options.output
@click.option("--plot", type=options.PATH, help="Also draw a plot: .svg, .png or .pdf.")
@click.option(
    "--measure",
    type=click.IntRange(0, MAX_COUNT),
    default=24,
    show_default=True,
    help="Most layers to run in the pipeline; 0 runs none.",
)
@options.prompts
@click.option("--count", type=options.COUNT, help="Prompts to run on; default: one batch.")
@options.device
@options.force
@options.quiet
@options.as_json
def sensitivity(quiet: bool, as_json: bool, **given: Any) -> None:
    """Measure what every layer of MODEL loses under every treatment.

    All layers are measured on the inputs that the calibration stored. Layers whose treatment is
    uncertain, given the recipe's budget, are also run in the pipeline, one at a time, to measure
    the error of the final latents. Attention modules are measured in the pipeline.

    Masks by SparseGPT are only measured with --hessians.
    """
    from quantkit.workflow.sensitivity import measure_sensitivity

    with progress_bar(quiet=quiet) as progress:
        found = measure_sensitivity(**given, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found, given["output"])


def _print(found: "MeasuredSensitivity", output: Path) -> None:
    gains, modules = found.gains, found.sensitivity.attention
    layers = [layer for layer in found.sensitivity.layers if layer not in modules]
    _print_worst("layer", layers, COLUMNS, gains, ORDERED_BY)
    if modules:
        _print_worst("attention module", modules, ATTENTION_COLUMNS, gains, "attention-e4m3fn")
    count = sum(gain.measured for gain in gains.values())
    echo(
        f"final FP8: gain x error of {ORDERED_BY}; {count} layers were run in the pipeline, gains "
        f"with * are medians; every layer and treatment is in {output}"
    )


def _print_worst(
    what: str,
    layers: "Sequence[LayerSensitivity]",
    columns: dict[str, str],
    gains: "Mapping[str, Gain]",
    ordered_by: str,
) -> None:
    def final(layer: "LayerSensitivity") -> float:
        return gains[layer.name].value * layer.outcomes[ordered_by].error

    worst = sorted(layers, key=lambda layer: (-final(layer), layer.name))[:SHOWN]
    rows = [
        (
            layer.name,
            *(_figure(layer, name) for name in columns),
            f"{gains[layer.name].value:.2g}{'' if gains[layer.name].measured else '*'}",
            f"{final(layer):.1e}",
        )
        for layer in worst
    ]
    title = f"Worst {len(rows)} of {len(layers)} {what}s: relative error (NMSE) of the output"
    print_table(title, (what, *columns.values(), "gain", "final FP8"), rows)


def _figure(layer: "LayerSensitivity", name: str) -> str:
    return f"{layer.outcomes[name].error:.1e}" if name in layer.outcomes else "-"
