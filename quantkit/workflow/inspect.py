"""Inspecting a packed directory."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.format_decisions import FormatDecision, format_decisions
from quantkit.checkpoint.packed_attention import PackedAttention
from quantkit.checkpoint.reader import Packed, open_packed
from quantkit.checkpoint.schemes import scheme_to_json
from quantkit.errors import CheckpointError
from quantkit.numerics.scheme import Scheme


@dataclass(frozen=True)
class InspectedLayer:
    """One packed layer."""

    component: str
    name: str
    kind: str
    #: dense shape of the weight
    shape: tuple[int, ...]
    scheme: Scheme
    #: strength that ``smooth: auto`` chose; None: none, or one strength for all, the recipe's
    smooth_alpha: float | None
    #: of the weight in 16 bit
    bytes_before: int
    #: of the weight, its scales and metadata
    bytes_after: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "component": self.component,
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            **scheme_to_json(self.scheme),
            "smooth_alpha": self.smooth_alpha,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }


@dataclass(frozen=True)
class Inspection:
    """The packed layers of a directory."""

    packed: Packed
    layers: tuple[InspectedLayer, ...]

    @property
    def bytes_before(self) -> int:
        """Size of the layers' weights in 16 bit."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Size of the packed layers."""
        return sum(layer.bytes_after for layer in self.layers)

    def __repr__(self) -> str:
        """Return layers and bytes in a line."""
        before, after = self.bytes_before, self.bytes_after
        return (
            f"{len(self.layers)} layers: {before:,} -> {after:,} bytes "
            f"({after / before:.1%} of 16 bit)"
        )

    @property
    def attention(self) -> dict[str, PackedAttention]:
        """The attention entries of components whose attention is on codes, by name."""
        asked = ((c.name, c.config.attention) for c in self.packed.components)
        return {name: attention for name, attention in asked if attention is not None}

    @property
    def formats(self) -> dict[tuple[str, str], FormatDecision]:
        """Formats of attention that errors decided, by component and module."""
        return {
            (component.name, module): decision
            for component in self.packed.components
            for module, decision in format_decisions(component).items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        components = [
            {
                "name": component.name,
                "class_name": component.class_name,
                "quantization_config": component.config.to_json(),
                "recipe": component.metadata[0].recipe,
            }
            for component in self.packed.components
        ]
        totals = {
            "layers": len(self.layers),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }
        layers = [layer.to_json() for layer in self.layers]
        return {
            "components": components,
            "layers": layers,
            "attention_formats": [
                {"component": component, "module": module, **asdict(decision)}
                for (component, module), decision in self.formats.items()
            ],
            "totals": totals,
        }


def inspect(packed: str | Path) -> Inspection:
    """Show the layers of a packed directory; headers and scales are checked on the way.

    Args:
        packed: a packed pipeline or component.

    Returns:
        formats, scales, sparsity, and bytes before and after, layer by layer.

    Raises:
        CheckpointError: nothing in it is packed, or a rule is broken.
    """
    opened = require_packed(packed)
    layers = (layer for component in opened.components for layer in _layers(component))
    return Inspection(opened, tuple(layers))


def require_packed(packed: str | Path) -> Packed:
    """Open a packed directory.

    Raises:
        CheckpointError: nothing in it is packed, or a rule is broken.
    """
    opened = open_packed(Path(packed))
    if not opened.components:
        raise CheckpointError(
            f"{packed}: nothing in it is packed by quantkit; expected the output of 'quantkit pack'"
        )
    return opened


def _layers(component: PackedComponent) -> list[InspectedLayer]:
    chosen = component.metadata[0].recipe.get("smooth_chosen", {})
    layers = []
    for name, scheme in component.config.layers.items():
        before, after = component.layer_bytes(name)
        record = component.records[name]
        alpha = chosen.get(name) if scheme.smooth else None
        layers.append(
            InspectedLayer(
                component.name,
                name,
                record.kind,
                tuple(record.shape),
                scheme,
                alpha,
                before,
                after,
            )
        )
    return layers
