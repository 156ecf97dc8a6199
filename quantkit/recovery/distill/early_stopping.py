"""Progress of a training: how far it is, how long it took, and when to stop it early."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ValidationScore:
    """How near the student's pictures are to the teacher's."""

    #: what was measured, as SSIM
    metric: str
    #: higher is better
    value: float


@dataclass(frozen=True)
class ScoredStep:
    """How near the pictures of one step's weights are."""

    step: int
    score: ValidationScore


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training is."""

    step: int
    #: mean squared error of the student's answers, over the steps since the last point
    loss: float
    #: of trajectories and training; looks and saving are left out
    seconds: float
    #: share of the steps or of the time, whichever is further: 1 at the end
    fraction: float
    #: the pictures, where they were looked at
    look: ValidationScore | None = None


class Clock:
    """Time of trajectories and training; it stands still while something else is done."""

    def __init__(self, elapsed: float = 0.0) -> None:
        """Start at ``elapsed`` seconds."""
        self._begun = time.monotonic() - elapsed
        #: seconds that it stood still
        self.paused_for = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._begun - self.paused_for

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still during the body."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.paused_for += time.monotonic() - begun


class EarlyStopping:
    """Counts looks that brought no improvement, and keeps the weights of the best."""

    def __init__(self, limit: int | None) -> None:
        """End after ``limit`` looks in vain; None: never."""
        self._limit = limit
        self._best = ScoredStep(0, ValidationScore("", -math.inf))
        self._vain = 0
        self._kept: dict[str, Tensor] | None = None

    @property
    def over(self) -> bool:
        """Whether there were too many."""
        return self._limit is not None and self._vain >= self._limit

    @property
    def best(self) -> dict[str, Tensor] | None:
        """The weights of the best look, once it is over; on the CPU."""
        return self._kept if self.over else None

    @property
    def best_step(self) -> ScoredStep | None:
        """The best look, once it is over."""
        return self._best if self.over else None

    def see(self, step: int, look: ValidationScore, average: dict[str, Tensor]) -> None:
        """Count the look at a step's weights."""
        if self._limit is None:
            return
        if look.value > self._best.score.value:
            self._best, self._vain = ScoredStep(step, look), 0
            self._kept = {n: v.detach().to("cpu", copy=True) for n, v in average.items()}
        else:
            self._vain += 1
