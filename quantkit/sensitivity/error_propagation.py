"""Gains from the error of a layer's output to that of the final latents: one per layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quantkit.sensitivity.sensitivity_file import LayerSensitivity


@dataclass(frozen=True)
class Gain:
    """Final error over local error of one layer, and where the figure is from."""

    value: float
    #: "measured", or the group that it is the median of
    source: str

    @property
    def measured(self) -> bool:
        """True when the layer itself was run in the pipeline."""
        return self.source == "measured"


def find_gains(layers: Sequence[LayerSensitivity]) -> dict[str, Gain]:
    """Return the gain of every layer.

    A layer that was not measured has the median of those of its role; of its kind, where the role
    has none; of all layers, where the kind has none; and 1 where nothing was measured.
    """
    own = {layer.name: gain for layer in layers if (gain := measured_gain(layer)) is not None}
    by_role = _medians(layers, own, {layer.name: layer.role for layer in layers})
    by_kind = _medians(layers, own, {layer.name: layer.kind for layer in layers})
    every = median(own.values()) if own else None
    return {layer.name: _gain(layer, own, by_role, by_kind, every) for layer in layers}


def measured_gain(layer: LayerSensitivity) -> float | None:
    """Return final over local error; None when not measured, or when there was no local error."""
    if layer.measured is None:
        return None
    local = layer.outcomes[layer.measured.treatment].error
    return layer.measured.error / local if local else None


def _gain(
    layer: LayerSensitivity,
    own: Mapping[str, float],
    by_role: Mapping[str, float],
    by_kind: Mapping[str, float],
    every: float | None,
) -> Gain:
    if layer.name in own:
        return Gain(own[layer.name], "measured")
    if layer.role in by_role:
        return Gain(by_role[layer.role], f"median of {layer.role}")
    if layer.kind in by_kind:
        return Gain(by_kind[layer.kind], f"median of {layer.kind}")
    return Gain(1.0, "nothing measured") if every is None else Gain(every, "median of all")


def _medians(
    layers: Sequence[LayerSensitivity], own: Mapping[str, float], group: Mapping[str, str]
) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for layer in layers:
        if layer.name in own:
            found.setdefault(group[layer.name], []).append(own[layer.name])
    return {name: median(values) for name, values in found.items()}
