"""``quantkit inspect``: what is inside a packed checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table

if TYPE_CHECKING:
    from quantkit.checkpoint.reader import Packed


@click.command()
@options.packed
@options.quiet
@options.as_json
def inspect(packed: Path, quiet: bool, as_json: bool) -> None:
    """Show the layers of PACKED: formats, scales, sparsity, bytes before and after.

    Headers and scales are checked on the way; 'quantkit verify' checks every byte.
    """
    show(packed, quiet=quiet, as_json=as_json)


def show(packed: Path, *, quiet: bool, as_json: bool) -> None:
    """Print the layers of a packed directory.

    Args:
        packed: a packed pipeline or component.
        quiet: print the totals alone.
        as_json: print JSON.

    Raises:
        CheckpointError: not packed, or a rule is broken.
    """
    from quantkit.checkpoint.reader import open_packed
    from quantkit.errors import CheckpointError

    opened = open_packed(packed)
    if not opened.components:
        raise CheckpointError(
            f"{packed}: nothing in it is packed by quantkit; wanted the output of 'quantkit pack'"
        )
    layers = _layers(opened)
    totals = {
        "layers": len(layers),
        "bytes_before": sum(layer["bytes_before"] for layer in layers),
        "bytes_after": sum(layer["bytes_after"] for layer in layers),
    }
    if as_json:
        components = [
            {
                "name": component.name,
                "class_name": component.class_name,
                "quantization_config": component.config.to_json(),
                "recipe": component.metadata[0].recipe,
            }
            for component in opened.components
        ]
        print_json({"components": components, "layers": layers, "totals": totals})
        return
    if not quiet:
        print_table(str(packed), _COLUMNS, [_row(layer) for layer in layers], least_width=120)
    before, after = totals["bytes_before"], totals["bytes_after"]
    echo(
        f"{totals['layers']} layers: {before:,} -> {after:,} bytes ({after / before:.1%} of 16 bit)"
    )


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


def _layers(opened: "Packed") -> list[dict[str, Any]]:
    from quantkit.checkpoint.schemes import scheme_to_json

    layers = []
    for component in opened.components:
        for name, scheme in component.config.layers.items():
            before, after = component.layer_bytes(name)
            record = component.records[name]
            recipe = component.metadata[0].recipe
            # What smooth: auto chose; one strength for all is the recipe's own.
            alpha = recipe.get("smooth_chosen", {}).get(name) if scheme.smooth else None
            layers.append(
                {
                    "component": component.name,
                    "name": name,
                    "kind": record.kind,
                    "shape": list(record.shape),
                    **scheme_to_json(scheme),
                    "smooth_alpha": alpha,
                    "bytes_before": before,
                    "bytes_after": after,
                }
            )
    return layers


def _row(layer: dict[str, Any]) -> tuple[object, ...]:
    activation = layer["activation"]
    if layer["buckets"]:
        activation += f" x{len(layer['buckets']) + 1}"
    if layer["smooth"]:
        alpha = layer["smooth_alpha"]
        activation += ", smooth" if alpha is None else f", smooth {alpha:g}"
    return (
        "/".join(filter(None, (layer["component"], layer["name"]))),
        layer["kind"],
        "x".join(map(str, layer["shape"])),
        layer["weight"],
        layer["granularity"],
        layer["sparsity"] or "dense",
        activation,
        layer["bytes_before"],
        layer["bytes_after"],
    )
