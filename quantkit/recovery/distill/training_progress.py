"""Progress of a training: steps, seconds, loss and validation scores."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ValidationScore:
    """The similarity of the student's pictures to the teacher's."""

    #: the metric, as SSIM
    metric: str
    #: higher is better
    value: float
    #: of each picture, whose mean it is; empty where the metric has one number for all
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class ScoredStep:
    """The validation score of one step's weights."""

    step: int
    score: ValidationScore


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training."""

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
