"""Where the inputs of a model's layers are concatenations, and where their halves meet."""

from collections.abc import Mapping, Sequence

from quantkit.models.family import Family
from quantkit.models.layers import Layer
from quantkit.recipe.fields import matches


def concat_boundaries(family: Family, layers: Sequence[Layer]) -> Mapping[str, int]:
    """Return the channels of the first half, for every layer that reads a skip concatenation.

    Args:
        family: says which layers read one and which write its first half.
        layers: of the component, kept ones too.

    Returns:
        by module path; 0 < boundary < the layer's input channels.
    """
    skips = family.skips
    if skips is None:
        return {}
    outputs = {
        position: layer.n
        for layer in layers
        if (position := _position(layer.name, skips.writers)) is not None
    }
    boundaries = {}
    for layer in layers:
        if matches(layer.name, skips.readers):
            before = [place for place in outputs if place < _place(layer.name, skips.writers)]
            first = outputs[max(before)] if before else layer.channels
            if first < layer.channels:
                boundaries[layer.name] = first
    return boundaries


def _position(layer: str, writers: Sequence[str]) -> tuple[int, ...] | None:
    return _place(layer, writers) if matches(layer, writers) else None


def _place(layer: str, writers: Sequence[str]) -> tuple[int, ...]:
    """Return when a layer runs: its stage (the writer that starts alike), its block, its place."""
    head = layer.split(".", maxsplit=1)[0]
    stage = [writer.split(".")[0] for writer in writers].index(head)
    return stage, *(int(part) for part in layer.split(".") if part.isdigit())
