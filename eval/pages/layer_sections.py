"""Sections of a report about its layers and its attention modules."""

from math import prod

from quantkit.eval.judging.evaluation_result import LayerRow, Report
from quantkit.eval.measuring.number_format import show, show_bytes
from quantkit.eval.pages.network_map import map_network, worst_layers
from quantkit.eval.pages.page import (
    Cell,
    Heading,
    NetworkDrawing,
    Part,
    Plot,
    Plots,
    Row,
    Section,
    Table,
    Text,
)
from quantkit.eval.pages.plots import plot_layer_errors


def layers_section(report: Report) -> Section:
    """Return the worst layers, the map of the network, errors, ranges by timestep, and all."""
    network, worst = map_network(report.layers), worst_layers(report.layers)
    parts: list[Part] = []
    if worst:
        parts += [Heading(f"{len(worst)} worst layers", f"by {network.error}"), _worst(worst)]
    parts += [NetworkDrawing(network, worst[0][1].name if worst else "")]
    if not report.quantized_by:
        caption = "Relative error of every packed layer: weight, output, kernel."
        parts += [Plots((Plot(plot_layer_errors(report.layers), caption),))]
    if report.ranges and report.ranges.rows:
        parts += [_ranges(report)]
    parts += [_all(report)]
    verb = "quantized" if report.quantized_by else "packed"
    digest = f"{report.packing.packed} of {len(report.layers)} {verb}"
    return Section("layers", "Layers", tuple(parts), digest)


def attention_section(report: Report) -> Section:
    """Return what each attention module is multiplied in, and why."""
    note = Text(
        "What each attention module is multiplied in: the fastest format whose relative error, of "
        "the module's output while calibrating, is within the recipe's budget; else 16 bit. After "
        "a hyphen: probabilities and values in 16 bit (pv16).",
        "soft",
    )
    rows = tuple(
        (
            _named(module.component, module.module),
            module.decision.chosen or "16 bit",
            ", ".join(f"{name}: {show(value)}" for name, value in module.decision.errors.items()),
            module.decision.reason,
        )
        for module in report.attention_formats
    )
    titles = ("Attention module", "Format", "Errors", "Why")
    table = Table("Formats of attention", titles, rows)
    digest = f"{len(rows)} attention modules"
    return Section("attention-formats", "Formats of attention", (note, table), digest)


def _named(component: str, name: str) -> Cell:
    return Cell(f"{component}{'.' if component else ''}{name}", style="name")


def _worst(worst: tuple[tuple[int, LayerRow], ...]) -> Table:
    titles = ("Layer", "Output error", "Weight error", "Format", "Packed")
    rows = (
        (
            _named(layer.component, layer.name), show(layer.output_error),
            show(layer.weight_error), layer.format, show_bytes(layer.bytes_after),
        )
        for _, layer in worst
    )  # fmt: skip
    return Table("Worst layers", titles, tuple(rows), numbers=(1, 2, 4))


def _ranges(report: Report) -> Section:
    ranges = report.ranges
    assert ranges is not None
    note = Text(
        "log2 of a layer's largest input of all timesteps over its largest input of these, as "
        "calibration saw it: so many bits of a static scale's range are unused there. From noise "
        "to picture.",
        "soft",
    )
    most = max(ranges.most, 1)
    rows = (
        (
            _named(layer.component, layer.name),
            *(
                Cell("-") if bits is None else Cell(f"{bits:.1f}", heat=round(100 * bits / most))
                for bits in layer.bits
            ),
        )
        for layer in ranges.rows
    )
    titles = ("Layer", *ranges.timesteps)
    numbers = range(1, len(titles))
    table = Table("Layers by timestep", titles, tuple(rows), numbers, style="heat")
    return Section(
        "ranges", "Layers by timestep", (note, table), "where one static scale wastes range"
    )


def _all(report: Report) -> Section:
    tool = "Format: the dtypes of the tensors that the file has for a layer. "
    note = Text(
        f"{tool if report.quantized_by else ''}Weight error: |W - dequantized| / |W| from the two "
        "files. Output error: against the 16-bit layer on the same real input. Kernel deviation: "
        "worst |kernel - reference| / rms(reference).",
        "soft",
    )
    titles = (
        "#", "Layer", "Kind", "Shape", "Format", "Weight error", "Output error",
        "Kernel deviation", "Bytes before", "After", "Backend",
    )  # fmt: skip
    rows = tuple(_layer(index, layer) for index, layer in enumerate(report.layers, 1))
    table = Table(
        "All layers", titles, rows, (0, 5, 6, 7, 8, 9), style="wide layers", sorted_as="layer-table"
    )
    return Section("all-layers", f"All {len(rows)} layers", (note, table))


def _layer(index: int, layer: LayerRow) -> Row:
    errors = map(show, (layer.weight_error, layer.output_error, layer.deviation))
    return (
        str(index),
        _named(layer.component, layer.name),
        layer.kind,
        Cell("x".join(map(str, layer.shape)), value=prod(layer.shape)),
        layer.format,
        *errors,
        str(layer.bytes_before),
        str(layer.bytes_after),
        f"{layer.backend}{f': {layer.reason}' if layer.reason else ''}",
    )
