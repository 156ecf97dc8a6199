"""Resemblance of pairs by CLIP: the distance of the pictures, and the match with the prompt.

Two scales that no CLIP model's own numbers are needed for, both from the original's pictures:
the distance from the original's picture, where 1 is as far as its pictures of other prompts are;
and the match with the prompt, where 1 is the original's and 0 that of its pictures of others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from quantkit.eval.measuring.backbones import ClipBackbone
from quantkit.eval.measuring.pictures import Pairs, Pixels
from quantkit.eval.measuring.sample_statistics import Array

#: With fewer pictures of other prompts nothing is known of how far unrelated pictures are.
LEAST_OTHERS = 4
#: An original whose match is not so many standard deviations above other pictures' is no measure.
CLEAR_MATCH = 2.0


@dataclass(frozen=True)
class Resemblance:
    """Distances and matches of every pair; None where the pictures give no scale."""

    backbone: str
    #: of the packed picture from the original's: 0 is identical, 1 as far as unrelated pictures
    distances: tuple[float | None, ...]
    #: of the packed picture with its prompt: 1 is the original's, 0 that of unrelated pictures
    matches: tuple[float | None, ...]


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
