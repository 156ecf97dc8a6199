"""Pairs of pictures as a page shows them: sources, alternative texts, numbers, and their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from urllib.parse import quote

from quantkit.eval.measuring.comparison import Comparison, Score
from quantkit.eval.measuring.embedding import (
    FIRST_SIDE,
    LIST_SIDE,
    Pictures,
    fits_the_list,
    full_id,
    preview,
)
from quantkit.eval.measuring.metrics import METRICS
from quantkit.eval.measuring.number_format import show
from quantkit.eval.measuring.pictures import Pairs

#: How many of the worst pairs stand first, and how many of the typical ones after them.
FIRST = 3
#: The metrics that say most about a pair.
TELLING = ("ssim", "lpips", "psnr")
#: Pictures of at most this many pixels a side are shown with their pixels, not smoothed.
PIXELATED_SIDE = 192


@dataclass(frozen=True)
class SortKey:
    """A metric by which a reader sorts and filters."""

    name: str
    title: str
    #: higher or lower
    better: str


@dataclass(frozen=True)
class Side:
    """One picture of a pair."""

    #: original, packed, or the name of a method
    label: str
    src: str
    #: "#" and the id of the measured picture in the page; empty: it is ``src``
    full: str
    #: (width, height) of the measured picture
    size: tuple[int, int]
    alt: str
    #: by sort key, as JavaScript reads a number; empty for the original
    values: tuple[tuple[str, str], ...] = ()
    #: title and number, as read by people
    numbers: tuple[tuple[str, str], ...] = ()

    @property
    def css(self) -> str:
        """The style: small pictures show their pixels."""
        return "small" if max(self.size) <= PIXELATED_SIDE else "large"


@dataclass(frozen=True)
class Pair:
    """The pictures of one prompt."""

    index: int
    name: str
    #: None: nobody knows
    seed: int | None
    prompt: str
    sides: tuple[Side, ...]
    #: "#" and the id of the difference in the page; empty: it is taken from the pictures
    difference: str = ""

    @property
    def numbers(self) -> str:
        """Metrics of the last side, in one line."""
        return ", ".join(f"{title} {text}" for title, text in self.sides[-1].numbers)


def sort_keys(comparison: Comparison) -> tuple[SortKey, ...]:
    """Return the metrics that pairs can be sorted by, SSIM first."""
    keys = [
        SortKey(name, score.metric.title, score.metric.better.value)
        for name, score in _telling_first(comparison)
    ]
    if comparison.clip is not None:
        keys.append(SortKey("clip", "CLIP score change", METRICS["clip"].better.value))
    return tuple(keys)


def choose_first(order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the three worst pairs and the three around the median, no pair twice.

    Args:
        order: positions of the pairs, the worst first.
    """
    worst, rest = tuple(order[:FIRST]), order[FIRST:]
    middle = max(0, len(order) // 2 - FIRST // 2 - FIRST)
    start = min(middle, max(0, len(rest) - FIRST))
    return worst, tuple(rest[start : start + FIRST])


@dataclass(frozen=True)
class PairView:
    """The pairs of one report, and where their pictures are."""

    pairs: Pairs
    comparison: Comparison
    #: one per pair; empty: nobody knows
    seeds: tuple[int, ...]
    pictures: Pictures
    #: the differences are stored beside the pictures
    differences: bool = False

    def first(self, index: int) -> Pair:
        """Return a pair to be shown large."""
        return self._pair(index, FIRST_SIDE)

    def listed(self, index: int) -> Pair:
        """Return a pair for the list of all."""
        return self._pair(index, LIST_SIDE)

    def _pair(self, index: int, side: int) -> Pair:
        prompts, inside = self.comparison.prompts, self.pictures is Pictures.INSIDE
        prompt = prompts[index] if prompts else ""
        small = fits_the_list(self.pairs.original[index])
        stored = self.differences and inside and not small
        return Pair(
            index,
            self.comparison.names[index],
            self.seeds[index] if self.seeds else None,
            prompt,
            (
                self._side("original", index, side, prompt),
                self._side("packed", index, side, prompt),
            ),
            f"#{full_id(index, 'difference')}" if stored else "",
        )

    def _side(self, label: str, index: int, side: int, prompt: str) -> Side:
        name = self.comparison.names[index]
        pixels = (self.pairs.original if label == "original" else self.pairs.packed)[index]
        if self.pictures is Pictures.INSIDE:
            full = "" if fits_the_list(pixels) else f"#{full_id(index, label)}"
            src = preview(pixels, side)
        else:
            src, full = f"images/{label}/{quote(name)}.png", ""
        packed = label == "packed"
        return Side(
            label, src, full, (pixels.shape[1], pixels.shape[0]),
            f"{label.capitalize()}, pair {name}{f': {prompt}' if prompt else ''}",
            pair_values(self.comparison, index) if packed else (),
            pair_numbers(self.comparison, index) if packed else (),
        )  # fmt: skip


def pair_values(comparison: Comparison, index: int) -> tuple[tuple[str, str], ...]:
    """Return the metrics of a pair as JavaScript reads them, by the names of ``sort_keys``."""
    found = {name: score.values[index] for name, score in comparison.scores.items()}
    if comparison.clip is not None:
        clip = comparison.clip
        found["clip"] = clip.packed.values[index] - clip.original.values[index]
    return tuple((name, _script_number(value)) for name, value in found.items())


def pair_numbers(comparison: Comparison, index: int) -> tuple[tuple[str, str], ...]:
    """Return the metrics of a pair as people read them."""
    numbers = [
        (
            f"{score.metric.title}{f' [{score.backbone}]' if score.backbone else ''}",
            show(score.values[index], score.metric.unit),
        )
        for _, score in _telling_first(comparison)
    ]
    if comparison.clip is not None:
        before, after = comparison.clip.original.values[index], comparison.clip.packed.values[index]
        numbers.append((f"CLIP [{comparison.clip.backbone}]", f"{before:.2f} -> {after:.2f}"))
    return tuple(numbers)


def look_first(
    order: Sequence[int], build: Callable[[int], Pair]
) -> tuple[tuple[str, tuple[Pair, ...]], ...]:
    """Return the groups of pairs that a page opens with, each with its heading."""
    worst, typical = choose_first(order)
    groups = (("Worst", worst), ("Typical", typical))
    return tuple((title, tuple(build(i) for i in chosen)) for title, chosen in groups if chosen)


def _telling_first(comparison: Comparison) -> list[tuple[str, Score]]:
    """Return the scores in the order of how much they tell: a narrow page shows the first two."""
    order = {name: place for place, name in enumerate(TELLING)}
    return sorted(comparison.scores.items(), key=lambda item: order.get(item[0], len(order)))


def _script_number(value: float) -> str:
    return repr(float(value)) if isfinite(value) else "Infinity" if value > 0 else "NaN"
