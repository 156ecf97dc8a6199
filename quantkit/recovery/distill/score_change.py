"""The change of the pictures' score from the beginning of a recovery to the weights it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.recovery.distill.training_progress import ScoredStep


@dataclass(frozen=True)
class ScoreChange:
    """Start, end and sign, for every place that tells of them."""

    metric: str
    start: float
    end: float

    @classmethod
    def between(cls, first: ScoredStep, written: ScoredStep) -> ScoreChange:
        """Return the change from one look to another, of the same metric."""
        return cls(first.score.metric, first.score.value, written.score.value)

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
        return f"{self.metric} {self.start:.4f} -> {self.end:.4f}, {self.sign}"
