"""How the time of a reconstruction is split over its parts."""

from quantkit.recovery.distill.early_stopping import Clock


class TimeBudget:
    """Time that is left, in proportion to the parameters that are left."""

    def __init__(self, clock: Clock, seconds: float | None, size: int) -> None:
        """Split what is left of ``seconds`` over ``size`` parameters; None: there is no limit."""
        self._clock = clock
        self._seconds = seconds
        self._left = size

    def share(self, size: int) -> float | None:
        """Return the seconds of a part of ``size`` parameters that begins now; None: no limit."""
        if self._seconds is None:
            return None
        left = max(0.0, self._seconds - self._clock.elapsed)
        return left * size / max(1, self._left)

    def done(self, size: int) -> None:
        """Count a part of ``size`` parameters as over."""
        self._left -= size

    @property
    def now(self) -> float:
        """Seconds so far."""
        return self._clock.elapsed
