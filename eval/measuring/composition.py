"""Kinds of pictures, which a mean hides: the same, a variant, or broken."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from quantkit.eval.measuring.comparison import Comparison

#: Limits where the noise floor has none wider; measured in docs/notes/methods.md. What is beyond
#: one of the first two is not the same picture, and if it is below the last one, it is broken.
DISSIMILARITY, DISTANCE, MATCH = 0.1, 0.03, 0.7
#: How far beyond the floor's upper decile a picture is no noise any more.
FLOOR_FACTOR, FLOOR_QUANTILE = 2.0, 0.9


class Kind(Enum):
    """The kind of a picture."""

    SAME = "same picture"
    #: another composition, or other things in it, that still match the prompt
    VARIANT = "variant"
    #: what it shows matches the prompt much less than the original's picture
    BROKEN = "broken"


@dataclass(frozen=True)
class Bounds:
    """Up to where a picture is the same, and from where it is broken."""

    #: 1 - SSIM
    dissimilarity: float
    distance: float
    match: float


@dataclass(frozen=True)
class PictureKinds:
    """The kinds of all pictures."""

    #: one per pair
    kinds: tuple[Kind, ...]
    bounds: Bounds
    #: positions of the pairs: broken ones first, then variants, each by rising SSIM
    order: tuple[int, ...]
    #: pairs whose match with the prompt is known; the others cannot be called broken
    matched: int

    @property
    def counts(self) -> dict[Kind, int]:
        """Pictures of each kind, in the order of the kinds."""
        found = Counter(self.kinds)
        return {kind: found[kind] for kind in Kind}

    @property
    def changed(self) -> int:
        """Pictures that are not the same: variants and broken ones."""
        return len(self.kinds) - self.counts[Kind.SAME]


def find_bounds(floors: Iterable[Comparison]) -> Bounds:
    """Return the bounds: the defaults, or wider ones where the original's own noise is wider."""
    dissimilarity, distance, match = DISSIMILARITY, DISTANCE, MATCH
    for floor in floors:
        ssim = [1.0 - value for value in floor.scores["ssim"].values]
        dissimilarity = max(dissimilarity, _widened(ssim))
        if floor.resemblance is not None:
            distance = max(distance, _widened(_known(floor.resemblance.distances)))
            match = min(match, *_known(floor.resemblance.matches), match)
    return Bounds(dissimilarity, distance, match)


def sort_pictures(comparison: Comparison, bounds: Bounds) -> PictureKinds:
    """Return what became of every picture, the changed ones first."""
    ssim = comparison.scores["ssim"].values
    none = (None,) * len(ssim)
    seen = comparison.resemblance
    distances, matches = (seen.distances, seen.matches) if seen else (none, none)
    kinds = tuple(_kind(*row, bounds) for row in zip(ssim, distances, matches, strict=True))
    ranks = list(Kind)[::-1]
    order = sorted(range(len(ssim)), key=lambda index: (ranks.index(kinds[index]), ssim[index]))
    return PictureKinds(kinds, bounds, tuple(order), len(_known(matches)))


def _kind(ssim: float, distance: float | None, match: float | None, bounds: Bounds) -> Kind:
    moved = 1.0 - ssim > bounds.dissimilarity
    if not moved and (distance is None or distance <= bounds.distance):
        return Kind.SAME
    return Kind.BROKEN if match is not None and match < bounds.match else Kind.VARIANT


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _widened(values: Sequence[float]) -> float:
    return FLOOR_FACTOR * float(np.quantile(values, FLOOR_QUANTILE)) if values else 0.0
