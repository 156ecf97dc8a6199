"""Pictures as WebP inside a page: small ones to look over, the measured ones to open."""

import base64
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from math import inf

from PIL import Image
from quantkit.eval.measuring.pictures import GAIN, Pairs, Pixels, amplified_difference

#: Bytes of WebP that one page may hold; as base64 they are a third more: 56 MB.
BUDGET = 42_000_000
#: Longer side of the pictures in the list of all, and of the few that stand first.
LIST_SIDE, FIRST_SIDE = 256, 640
#: What the measured pictures are saved with, the first that keeps the budget; None: without loss.
QUALITIES: tuple[int | None, ...] = (None, 95, 90, 80, 65)
#: Pairs from which the size of all is foreseen.
_TRIED = 3
#: Of the small pictures, and of differences: nobody measures them.
_SMALL_QUALITY = 85


class Pictures(Enum):
    """The place of a page's pictures."""

    #: in the page, which is then one file
    INSIDE = "inside"
    #: in the folder images/ beside it: the measured files themselves
    BESIDE = "beside"


@dataclass(frozen=True)
class Store:
    """The measured pictures of a page as base64 of WebP, by the id that they have there."""

    entries: tuple[tuple[str, str], ...] = ()
    #: None: without loss
    quality: int | None = None

    @property
    def lossy(self) -> bool:
        """True when a difference must not be taken from these pictures: it has its own."""
        return self.quality is not None


def full_id(index: int, side: str) -> str:
    """Return the id of a measured picture in the page."""
    return f"full-{index}-{side}"


def fits_the_list(pixels: Pixels) -> bool:
    """Return whether the list shows the picture as it was measured."""
    return bool(max(pixels.shape[:2]) <= LIST_SIDE)


def preview(pixels: Pixels, side: int) -> str:
    """Return the picture as a data URI, no longer than ``side``; a small one without loss."""
    image = Image.fromarray(pixels, "RGB")
    image.thumbnail((side, side))
    return "data:image/webp;base64," + _webp(
        image, None if fits_the_list(pixels) else _SMALL_QUALITY
    )


def store_pictures(pairs: Pairs, *, budget: int = BUDGET) -> Store:
    """Return the measured pictures in the best quality that keeps the budget.

    Pictures that the list shows as they are need no second copy. Those with loss bring their
    differences, amplified ``GAIN`` times, made before the loss.

    Args:
        pairs: of one report.
        budget: bytes of WebP.
    """
    indices = [i for i, picture in enumerate(pairs.original) if not fits_the_list(picture)]
    for quality in QUALITIES:
        entries = _encode(pairs, indices, quality, budget)
        if entries is not None:
            return Store(entries, quality)
    # The worst is taken whatever it needs: a page without pictures helps nobody.
    return Store(_encode(pairs, indices, QUALITIES[-1], inf) or (), QUALITIES[-1])


def _encode(
    pairs: Pairs, indices: Sequence[int], quality: int | None, budget: float
) -> tuple[tuple[str, str], ...] | None:
    """Return every picture encoded; None as soon as they seem to become more than the budget."""
    entries: list[tuple[str, str]] = []
    with ThreadPoolExecutor(min(3, os.cpu_count() or 1)) as pool:
        for done, index in enumerate(indices, 1):
            entries += pool.map(_entry, _pair(pairs, index, quality))
            size = sum(len(text) * 3 // 4 for _, text in entries)
            if size > budget or (done == _TRIED and size * len(indices) / done > budget):
                return None
    return tuple(entries)


def _pair(
    pairs: Pairs, index: int, quality: int | None
) -> Iterator[tuple[str, Pixels, int | None]]:
    original, packed = pairs.original[index], pairs.packed[index]
    yield full_id(index, "original"), original, quality
    yield full_id(index, "packed"), packed, quality
    if quality is not None:
        difference = amplified_difference(original, packed, gain=GAIN)
        yield full_id(index, "difference"), difference, min(quality, _SMALL_QUALITY)


def _entry(row: tuple[str, Pixels, int | None]) -> tuple[str, str]:
    name, pixels, quality = row
    return name, _webp(Image.fromarray(pixels, "RGB"), quality)


def _webp(image: Image.Image, quality: int | None) -> str:
    data = io.BytesIO()
    # method 2: at 1024x1024 a photograph takes 0.7 s
    if quality is None:
        image.save(data, format="WEBP", lossless=True, quality=50, method=2)
    else:
        image.save(data, format="WEBP", quality=quality, method=2)
    return base64.b64encode(data.getvalue()).decode("ascii")
