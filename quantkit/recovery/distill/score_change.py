"""The change of the pictures' score from the beginning of a recovery to the weights it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.recovery.distill.training_progress import ScoredStep

_DIGITS = 4


@dataclass(frozen=True)
class ScoreChange:
    """Start, end and sign, for every place that tells of them."""

    metric: str
    start: float
    end: float

    @classmethod
    def between(cls, first: ScoredStep, written: ScoredStep) -> ScoreChange:
        """Return the change from one look to another, of the same metric, as it is printed."""
        start, end = (round(look.score.value, _DIGITS) for look in (first, written))
        return cls(first.score.metric, start, end)

    @property
    def is_worse(self) -> bool:
        """True where the score fell, or is no number: higher is better."""
        return not self.end >= self.start

    @property
    def sign(self) -> str:
        """The direction in a word."""
        if self.end == self.start:
            return "unchanged"
        return "worse" if self.is_worse else "better"

    def __str__(self) -> str:
        """Return it in a line."""
        start, end = (f"{value:.{_DIGITS}f}" for value in (self.start, self.end))
        return f"{self.metric} {start} -> {end}, {self.sign}"
