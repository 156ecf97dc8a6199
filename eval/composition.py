"""What became of each picture, which a mean hides: the same, a variant, or broken.

Two scales that no CLIP model's own numbers are needed for, both from the original's pictures:
the distance from the original's picture, where 1 is as far as its pictures of other prompts are;
and the match with the prompt, where 1 is the original's and 0 that of its pictures of others.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from .backbones import ClipBackbone
from .images import Pairs, Pixels
from .statistics import Array

if TYPE_CHECKING:
    from .comparison import Comparison

#: With fewer pictures of other prompts nothing is known of how far unrelated pictures are.
LEAST_OTHERS = 4
#: An original whose match is not so many standard deviations above other pictures' is no measure.
CLEAR_MATCH = 2.0

#: Limits where the noise floor has none wider; measured in docs/notes/methods.md. What is beyond
#: one of the first two is not the same picture, and if it is below the last one, it is broken.
DISSIMILARITY, DISTANCE, MATCH = 0.1, 0.03, 0.7
#: How far beyond the floor's upper decile a picture is no noise any more.
FLOOR_FACTOR, FLOOR_QUANTILE = 2.0, 0.9


class Kind(Enum):
    """What became of a picture."""

    SAME = "same picture"
    #: another composition, or other things in it, that still match the prompt
    VARIANT = "variant"
    #: what it shows matches the prompt much less than the original's picture
    BROKEN = "broken"


@dataclass(frozen=True)
class Resemblance:
    """What CLIP makes of every pair; None where the pictures give no scale."""

    backbone: str
    #: of the packed picture from the original's: 0 is identical, 1 as far as unrelated pictures
    distances: tuple[float | None, ...]
    #: of the packed picture with its prompt: 1 is the original's, 0 that of unrelated pictures
    matches: tuple[float | None, ...]


@dataclass(frozen=True)
class Bounds:
    """Up to where a picture is the same, and from where it is broken."""

    #: 1 - SSIM
    dissimilarity: float
    distance: float
    match: float


@dataclass(frozen=True)
class PictureKinds:
    """What became of all pictures."""

    #: one per pair
    kinds: tuple[Kind, ...]
    bounds: Bounds
    #: positions of the pairs: broken ones first, then variants, each by rising SSIM
    order: tuple[int, ...]
    #: pairs whose match with the prompt is known; the others cannot be called broken
    matched: int

    @property
    def counts(self) -> dict[Kind, int]:
        """How many there are of each kind, in the order of the kinds."""
        found = Counter(self.kinds)
        return {kind: found[kind] for kind in Kind}


def resemble(pairs: Pairs, prompts: Sequence[str], clip: ClipBackbone) -> Resemblance:
    """Measure every pair against the original's pictures of other prompts."""
    others_of = [[other != prompt for other in prompts] for prompt in prompts]
    if all(sum(others) < LEAST_OTHERS for others in others_of):
        return Resemblance(clip.name, (None,) * len(prompts), (None,) * len(prompts))
    before, texts = _embed(clip, pairs.original, prompts)
    after, _ = _embed(clip, pairs.packed, prompts)
    distances, matches = list[float | None](), list[float | None]()
    for index, mask in enumerate(others_of):
        others = before[mask]
        if len(others) < LEAST_OTHERS:
            distances.append(None)
            matches.append(None)
            continue
        far = float(np.median(1.0 - others @ before[index]))
        apart = max(0.0, 1.0 - float(after[index] @ before[index]))
        distances.append(apart / far if far > 0.0 else None)
        matches.append(_match(after[index], before[index], others, texts[index]))
    return Resemblance(clip.name, tuple(distances), tuple(matches))


def find_bounds(floors: Iterable["Comparison"]) -> Bounds:
    """Return the bounds: the defaults, or wider ones where the original's own noise is wider."""
    dissimilarity, distance, match = DISSIMILARITY, DISTANCE, MATCH
    for floor in floors:
        ssim = [1.0 - value for value in floor.scores["ssim"].values]
        dissimilarity = max(dissimilarity, _widened(ssim))
        if floor.resemblance is not None:
            distance = max(distance, _widened(_known(floor.resemblance.distances)))
            match = min(match, *_known(floor.resemblance.matches), match)
    return Bounds(dissimilarity, distance, match)


def sort_pictures(comparison: "Comparison", bounds: Bounds) -> PictureKinds:
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


def _match(after: Array, before: Array, others: Array, text: Array) -> float | None:
    """Return the packed picture's match on the scale of other pictures and the original's."""
    unrelated = others @ text
    own = float(before @ text) - float(unrelated.mean())
    if own <= CLEAR_MATCH * float(unrelated.std(ddof=1)):
        return None
    return (float(after @ text) - float(unrelated.mean())) / own


def _embed(
    clip: ClipBackbone, pictures: Sequence[Pixels], prompts: Sequence[str]
) -> tuple[Array, Array]:
    """Return unit vectors of pictures and prompts, float64 (N, D) each."""
    rows = [clip.embed(*pair) for pair in zip(pictures, prompts, strict=True)]
    images, texts = (
        np.stack([row[side].double().cpu().numpy() for row in rows]) for side in (0, 1)
    )
    return _unit(images), _unit(texts)


def _unit(vectors: Array) -> Array:
    unit: Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _widened(values: Sequence[float]) -> float:
    return FLOOR_FACTOR * float(np.quantile(values, FLOOR_QUANTILE)) if values else 0.0
