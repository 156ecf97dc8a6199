"""Summary of a packed model: layer by layer, and in bytes."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.schemes import scheme_to_json
from quantkit.numerics.scheme import Scheme
from quantkit.storage.sizes import tell_sizes


@dataclass(frozen=True)
class LayerSummary:
    """The summary of one layer."""

    component: str
    name: str
    kind: str
    #: dense shape of the weight
    shape: tuple[int, ...]
    #: None: it stays as it was
    scheme: Scheme | None
    #: why it stays, or is dense or in another format though the recipe asks otherwise; else ""
    reason: str
    #: SmoothQuant's strength; None: none of it
    smooth_alpha: float | None
    #: whether the bias was corrected; None: not asked for, False: there is no bias
    bias_corrected: bool | None
    #: of the weight, its scales and metadata
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ComponentSummary:
    """The summary of one component's weight files."""

    name: str
    class_name: str
    bytes_before: int
    bytes_after: int

    @property
    def sizes(self) -> str:
        """Bytes before and after, in words."""
        return tell_sizes(self.bytes_before, self.bytes_after)


@dataclass(frozen=True)
class PackSummary:
    """The summary of a packed model: what was packed, kept, copied and left out."""

    output: Path
    components: tuple[ComponentSummary, ...]
    layers: tuple[LayerSummary, ...]
    #: of files that are copied as they are
    copied_files: int
    copied_bytes: int
    #: weight files next to those that were packed, relative to the model: not in the output
    left_out: tuple[Path, ...]

    @property
    def bytes_before(self) -> int:
        """Size of the packed weight files' sources and of all that is copied."""
        return self.copied_bytes + sum(c.bytes_before for c in self.components)

    @property
    def bytes_after(self) -> int:
        """Size of the output without config files."""
        return self.copied_bytes + sum(c.bytes_after for c in self.components)

    def by_scheme(self) -> dict[Scheme, int]:
        """Return how many layers each treatment has."""
        counts: dict[Scheme, int] = {}
        for layer in self.layers:
            if layer.scheme is not None:
                counts[layer.scheme] = counts.get(layer.scheme, 0) + 1
        return counts

    def kept(self) -> dict[str, list[str]]:
        """Return the layers that stay as they were, by reason."""
        return _by_reason(layer for layer in self.layers if layer.scheme is None)

    def by_alpha(self) -> dict[float, list[str]]:
        """Return the layers that SmoothQuant smooths, by its strength, ascending."""
        layers: dict[float, list[str]] = {}
        for layer in self.layers:
            if layer.smooth_alpha is not None:
                layers.setdefault(layer.smooth_alpha, []).append(layer.name)
        return dict(sorted(layers.items()))

    def uncorrected(self) -> list[str]:
        """Return the packed layers whose bias was to be corrected, and that have none."""
        return [layer.name for layer in self.layers if layer.bias_corrected is False]

    def otherwise(self) -> dict[str, list[str]]:
        """Return the layers that are packed, but not quite as the recipe asks, by reason."""
        return _by_reason(layer for layer in self.layers if layer.scheme and layer.reason)

    @property
    def masked(self) -> int:
        """The number of sparse layers."""
        schemes = [layer.scheme for layer in self.layers if layer.scheme is not None]
        return sum(scheme.sparsity is not None for scheme in schemes)

    @property
    def sizes(self) -> str:
        """Bytes before and after, in words."""
        return tell_sizes(self.bytes_before, self.bytes_after)

    @property
    def counts(self) -> str:
        """Layers and bytes in a line."""
        packed = sum(self.by_scheme().values())
        return (
            f"{packed} layers packed, {self.masked} of them sparse, {len(self.layers) - packed} "
            f"kept in 16 bit: {self.sizes}"
        )

    def __repr__(self) -> str:
        """Return layers and bytes in two lines."""
        return f"{self.counts}\noutput: {self.output}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = asdict(self)
        for entry, layer in zip(values["layers"], self.layers, strict=True):
            entry["scheme"] = None if layer.scheme is None else scheme_to_json(layer.scheme)
        values["output"] = str(self.output)
        values["left_out"] = [str(file) for file in self.left_out]
        sizes = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return {"output": values.pop("output"), **sizes, **values}


def _by_reason(layers: Iterable[LayerSummary]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        reasons.setdefault(layer.reason, []).append(layer.name)
    return reasons
