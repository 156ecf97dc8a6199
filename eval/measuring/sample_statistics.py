"""Summaries of per-prompt values and paired differences: moments and bootstrap intervals.

Infinite values (PSNR of identical pictures) are kept out of both, and counted.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999
#: One seed for every interval, so that a report can be made again to the digit.
SEED = 20_240_501

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A bootstrap confidence interval, and the variant of the method that gave it."""

    low: float
    high: float
    method: str

    def holds(self, value: float) -> bool:
        """Return True when the value lies inside, bounds included."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Summary:
    """Moments of a list of values; None where the values do not define them."""

    count: int
    mean: float | None
    std: float | None
    minimum: float | None
    maximum: float | None
    median: float | None
    interval: Interval | None
    note: str = ""


def summarize(values: Sequence[float], *, infinite_note: str = "infinite") -> Summary:
    """Return moments, extremes and the bootstrap interval of the mean.

    Args:
        values: any number; infinite ones are left out of everything and counted in the note.
        infinite_note: what an infinite value means, for the note.

    Returns:
        The summary of the finite values; std and interval want at least two of them.
    """
    assert not any(isnan(value) for value in values)
    finite = np.array([value for value in values if isfinite(value)], dtype=np.float64)
    left_out = len(values) - len(finite)
    note = f"{left_out} of {len(values)} {infinite_note}, left out" if left_out else ""
    if not len(finite):
        return Summary(len(values), None, None, None, None, None, None, note)
    return Summary(
        count=len(values),
        mean=float(finite.mean()),
        std=float(finite.std(ddof=1)) if len(finite) > 1 else None,
        minimum=float(finite.min()),
        maximum=float(finite.max()),
        median=float(np.median(finite)),
        interval=bootstrap_mean(finite),
        note=note,
    )


def summarize_difference(
    after: Sequence[float], before: Sequence[float], *, infinite_note: str = "infinite"
) -> Summary:
    """Return the summary of ``after - before``; its interval resamples pairs.

    Args:
        after: one value per prompt.
        before: of the same prompts. A pair in which either is infinite is left out.
        infinite_note: what an infinite value means, for the note.
    """
    return summarize(subtract_pairs(after, before), infinite_note=infinite_note)


def subtract_pairs(after: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return ``after - before`` of every pair; infinite where either is."""
    pairs = zip(after, before, strict=True)
    return [a - b if isfinite(a) and isfinite(b) else inf for a, b in pairs]


def bootstrap_mean(values: Array) -> Interval | None:
    """Return the 95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    if np.ptp(values) == 0.0:
        return Interval(float(values[0]), float(values[0]), "all values equal")
    return _bootstrap((values,), _mean)


def relative_loss(before: Array, after: Array) -> float | None:
    """Return how much smaller the mean became, in % of it; None if the mean was not positive."""
    mean = float(before.mean())
    return None if mean <= 0.0 else 100.0 * (mean - float(after.mean())) / mean


def bootstrap_loss(before: Array, after: Array) -> Interval | None:
    """Return the 95 % interval of ``relative_loss``, resampling pairs; None as there."""
    loss = relative_loss(before, after)
    if loss is None or len(before) < 2:
        return None
    # Every pair losing the same share makes every resample the same, but for rounding.
    if np.allclose(after * before.mean(), before * after.mean(), rtol=1e-12, atol=0.0):
        return Interval(loss, loss, "all values equal")
    return _bootstrap((before, after), _loss)


def _bootstrap(samples: tuple[Array, ...], statistic: Callable[..., Array]) -> Interval | None:
    for method in ("BCa", "percentile"):
        # BCa divides by the spread of jackknife values, which few or tied values can make zero.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            low, high = stats.bootstrap(
                samples,
                statistic,
                paired=True,
                vectorized=True,
                method=method,
                confidence_level=CONFIDENCE,
                n_resamples=RESAMPLES,
                random_state=np.random.default_rng(SEED),
            ).confidence_interval
        if isfinite(low) and isfinite(high):
            return Interval(float(low), float(high), method)
    return None


def _mean(values: Array, axis: int) -> Array:
    return np.asarray(values.mean(axis=axis))


def _loss(before: Array, after: Array, axis: int) -> Array:
    mean = before.mean(axis=axis)
    return np.asarray(100.0 * (mean - after.mean(axis=axis)) / mean)
