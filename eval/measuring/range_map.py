"""Layers by timesteps: where a layer's inputs are so small that one static scale wastes bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from quantkit.calibration.statistics.layer_statistics import Calibration


@dataclass(frozen=True)
class RangeRow:
    """One layer."""

    component: str
    name: str
    #: by bucket, log2 of the largest |input| of all timesteps over the largest of these; None: a
    #: bucket without calls, or zeros alone
    bits: tuple[float | None, ...]


@dataclass(frozen=True)
class RangeMap:
    """Unused bits of every layer's static scale, by timestep."""

    #: of the buckets, from noise to picture: in words
    timesteps: tuple[str, ...]
    #: in the order of the model
    rows: tuple[RangeRow, ...]

    @property
    def most(self) -> float:
        """The largest of all."""
        return max((bits for row in self.rows for bits in row.bits if bits is not None), default=0)

    def of(self, places: Sequence[tuple[str, str]]) -> "RangeMap":
        """Return the rows of these (component, name), in their order; one alone has no name."""
        found = {(row.component, row.name): row for row in self.rows}
        rows = (found.get(place) or found.get(("", place[1])) for place in places)
        return RangeMap(self.timesteps, tuple(row for row in rows if row is not None))


def map_ranges(calibration: Calibration) -> RangeMap | None:
    """Return the map of a calibration; None where all timesteps are in one bucket."""
    if not calibration.edges:
        return None
    rows = tuple(
        RangeRow(component, name, _bits(layer.amax.tolist())[::-1])
        for component, layers in calibration.layers.items()
        for name, layer in layers.items()
    )
    return RangeMap(_words(calibration.edges)[::-1], rows)


def _bits(largest: Sequence[float]) -> tuple[float | None, ...]:
    most = max(largest)
    return tuple(log2(most / value) if value > 0.0 else None for value in largest)


def _words(edges: Sequence[float]) -> tuple[str, ...]:
    """Return the buckets in words, the lowest timesteps first."""
    between = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    return (f"below {edges[0]:g}", *between, f"from {edges[-1]:g}")
