"""Inspecting a calibration file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.layer_statistics import Calibration, load_calibration


@dataclass(frozen=True, eq=False)
class InspectedAttention:
    """One attention module, over all timestep buckets."""

    component: str
    name: str
    #: pooled: one bucket
    statistics: AttentionStatistics

    @property
    def keys(self) -> int:
        """The most that a picture had in one call."""
        return int(self.statistics.call_keys[0])

    @property
    def q_amax(self) -> float:
        """Largest |q| of any head."""
        return float(self.statistics.q_amax.amax())

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, with a list over heads where heads differ."""
        known = self.statistics
        return {
            "component": self.component,
            "name": self.name,
            "heads": known.heads,
            "columns": known.columns,
            "queries": int(known.call_queries[0]),
            "keys": self.keys,
            "q_amax": known.q_amax[0].tolist(),
            "k_amax": _amax(known.k_low, known.k_high),
            "v_amax": _amax(known.v_low, known.v_high),
        }


@dataclass(frozen=True, eq=False)
class CalibrationInspection:
    """The contents of a calibration."""

    calibration: Calibration
    attention: tuple[InspectedAttention, ...]

    def __repr__(self) -> str:
        """Return it in a line."""
        about = self.calibration.metadata
        layers = sum(map(len, self.calibration.layers.values()))
        return (
            f"{layers} layers, {len(self.attention)} attention modules; {about.prompts} prompts, "
            f"{about.steps} steps, {len(self.calibration.edges) + 1} buckets"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        about = self.calibration.metadata
        return {
            "recipe": about.recipe,
            "prompts": about.prompts,
            "steps": about.steps,
            "edges": list(self.calibration.edges),
            "layers": {name: list(layers) for name, layers in self.calibration.layers.items()},
            "attention": [module.to_json() for module in self.attention],
        }


def inspect_calibration(path: str | Path) -> CalibrationInspection:
    """Show a calibration's attention statistics and provenance.

    Args:
        path: the file.

    Returns:
        modules with the statistics of all buckets as one.

    Raises:
        ArtefactError: missing, damaged, or of a newer version.
    """
    found = load_calibration(Path(path))
    modules = (
        InspectedAttention(component, name, statistics.pooled())
        for component, table in found.attention.items()
        for name, statistics in table.items()
    )
    return CalibrationInspection(found, tuple(modules))


def _amax(low: Tensor, high: Tensor) -> list[float]:
    """Return the largest |x| of each head."""
    found: list[float] = (-low).maximum(high).amax(dim=2)[0].tolist()
    return found
