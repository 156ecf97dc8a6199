"""The change of the pictures' score from the beginning of a recovery to the weights it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy import stats

if TYPE_CHECKING:
    from quantkit.recovery.distill.training_progress import ValidationScore

_DIGITS = 4
#: Of the paired t-test that shows harm.
_ALPHA = 0.05


@dataclass(frozen=True)
class ScoreChange:
    """Start, end and sign, for every place that tells of them."""

    metric: str
    start: float
    end: float
    #: pictures that were compared, of which a fall of the mean may be chance; 0: it is none
    by_chance: int = 0

    @classmethod
    def between(cls, first: ValidationScore, written: ValidationScore) -> ScoreChange:
        """Return the change from one look to another, of the same metric, as it is printed."""
        start, end = (round(score.value, _DIGITS) for score in (first, written))
        # Not strict: latents have one number for all.
        falls = tuple(b - a for b, a in zip(first.values, written.values, strict=False))
        chance = end < start and len(set(falls)) > 1 and not _are_shown(falls)
        return cls(first.metric, start, end, len(falls) if chance else 0)

    @property
    def is_worse(self) -> bool:
        """True where the score fell, and not by chance, or is no number: higher is better."""
        return not self.end >= self.start and not self.by_chance

    @property
    def sign(self) -> str:
        """The direction in a word."""
        if self.end == self.start:
            return "unchanged"
        if self.end > self.start:
            return "better"
        return "worse" if self.is_worse else "undecided"

    def __str__(self) -> str:
        """Return it in a line."""
        start, end = (f"{value:.{_DIGITS}f}" for value in (self.start, self.end))
        chance = f" by {self.by_chance} pictures" if self.sign == "undecided" else ""
        return f"{self.metric} {start} -> {end}, {self.sign}{chance}"


def _are_shown(falls: tuple[float, ...]) -> bool:
    """Tell whether a t-test over pictures shows that scores fell on the whole."""
    return bool(stats.ttest_1samp(falls, 0.0, alternative="greater").pvalue < _ALPHA)
