"""What is checked whenever a packed component is loaded: its files, and files against the model.

Headers and scales follow the rules of FORMAT.md (``open_packed``), layers fit the modules that they
stand for. Checksums and codes take a pass over all bytes and are left to ``quantkit verify`` and to
``load_pipeline(..., checksums=True)``.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.checkpoint.reader import open_packed
from quantkit.errors import CheckpointError
from quantkit.inference.packed_layer import PackedLayer

_CURE = "config.json, weights and model class do not belong together; pack the model again"


def check_component(folder: Path, layers: Mapping[str, PackedLayer]) -> None:
    """Check a component directory, and that its layers fit the model that was built.

    Args:
        folder: of config.json and the weights.
        layers: module path to the empty packed layer that stands there.

    Raises:
        CheckpointError: a broken rule, a layer of another shape, a bias too few or too many.
    """
    (component,) = open_packed(folder).components
    for name, layer in layers.items():
        found, has_bias = component.records[name].shape, f"{name}.bias" in component.tensors
        if found != layer.dense_shape:
            raise CheckpointError(
                f"{folder}: {name}: packed from {list(found)}, the model has "
                f"{list(layer.dense_shape)}; {_CURE}"
            )
        if has_bias != (layer.bias is not None):
            found_text, wanted = ("a bias", "none") if has_bias else ("no bias", "one")
            raise CheckpointError(
                f"{folder}: {name}: {found_text}, the model has {wanted}; {_CURE}"
            )


def some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return ", ".join(ordered[:8]) + more
