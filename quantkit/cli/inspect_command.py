"""``quantkit inspect``: the contents of a packed checkpoint, or of a calibration."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from quantkit.checkpoint.format_decisions import FormatDecision
    from quantkit.workflow.inspect import InspectedLayer
    from quantkit.workflow.inspect_calibration import InspectedAttention

_COLUMNS = (
    "layer",
    "kind",
    "shape",
    "weight",
    "scale per",
    "sparsity",
    "activation",
    "before",
    "after",
)
_ATTENTION_COLUMNS = ("attention module", "heads", "columns", "keys", "largest |q|")
_FORMAT_COLUMNS = ("attention module", "format", "why")


@click.command(cls=Command, example="quantkit inspect sdxl-int8")
@options.packed_or_file
@options.quiet
@options.as_json
def inspect(packed: Path, quiet: bool, as_json: bool) -> None:
    """Show the layers of PACKED: formats, scales, sparsity, bytes before and after; its attention.

    Headers and scales are checked on the way; 'quantkit verify' checks every byte. Of a
    calibration file, show its attention modules. --json has every head.
    """
    from quantkit.workflow.inspect import inspect

    del quiet  # Read where tables are printed.
    if packed.is_file():
        _inspect_calibration(packed, as_json=as_json)
        return
    found = inspect(packed)
    if as_json:
        print_json(found.to_json())
        return
    print_table(str(packed), _COLUMNS, [_row(layer) for layer in found.layers])
    for name, attention in found.attention.items():
        echo(f"{f'{name}: ' * bool(name)}attention: {attention}")
    if found.formats:
        formats = [_format_row(*place, decision) for place, decision in found.formats.items()]
        print_table("Formats of attention", _FORMAT_COLUMNS, formats)
    echo(found)


def _inspect_calibration(path: Path, *, as_json: bool) -> None:
    from quantkit.workflow.inspect_calibration import inspect_calibration

    found = inspect_calibration(path)
    if as_json:
        print_json(found.to_json())
        return
    print_table(str(path), _ATTENTION_COLUMNS, [_attention_row(m) for m in found.attention])
    echo(found)


def _attention_row(module: "InspectedAttention") -> tuple[object, ...]:
    return (
        f"{module.component}/{module.name}",
        module.statistics.heads,
        module.statistics.columns,
        module.keys,
        module.q_amax,
    )


def _format_row(component: str, module: str, found: "FormatDecision") -> tuple[object, ...]:
    return "/".join(filter(None, (component, module))), found.chosen or "16 bit", found.reason


def _row(layer: "InspectedLayer") -> tuple[object, ...]:
    told = layer.to_json()
    activation = told["activation"]
    if told["buckets"]:
        activation += f" x{len(told['buckets']) + 1}"
    if "token_below" in told:
        activation += f", token below {told['token_below']:g}"
    if told["smooth"]:
        alpha = layer.smooth_alpha
        activation += ", smooth" if alpha is None else f", smooth {alpha:g}"
    return (
        "/".join(filter(None, (layer.component, layer.name))),
        layer.kind,
        "x".join(map(str, layer.shape)),
        told["weight"],
        told["granularity"],
        told["sparsity"] or "dense",
        activation,
        layer.bytes_before,
        layer.bytes_after,
    )
