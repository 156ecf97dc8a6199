"""Tests of a mean against a limit: t-tests both ways, equivalence, Holm, prompts that decide.

Values are paired by prompt before they come here, so every test is of one sample. What the tests
say of a metric is in gates.py and noise_floor.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from quantkit.eval.measuring.sample_statistics import CONFIDENCE
from scipy import stats

#: Level of a one-sided test: what lies outside a two-sided 95 % interval on one of its sides.
ALPHA = (1.0 - CONFIDENCE) / 2.0
#: How often the number of prompts that is asked for should bring a decision.
POWER = 0.8
#: More prompts than this are not asked for: such a difference is none that pictures show.
MOST_PROMPTS = 10_000


@dataclass(frozen=True)
class OneSided:
    """Two one-sided t-tests of a mean against zero."""

    count: int
    #: p-value of "the mean is not above zero": small ones say that it is
    above: float
    #: p-value of "the mean is not below zero"
    below: float


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST) of a mean difference against a margin on either side."""

    margin: float
    #: the larger of both p-values: small ones say that the mean lies within the margin
    p: float

    @property
    def shown(self) -> bool:
        """True when the mean lies within the margin by both tests."""
        return self.p <= ALPHA


def compare_with_zero(values: Sequence[float]) -> OneSided | None:
    """Return the t-tests of the mean against zero; None for fewer than two values.

    Args:
        values: one per prompt; infinite ones are left out, and NaN is no value at all.

    Returns:
        Both p-values. Equal values have no spread: p is then 0 on their side of zero, and 1 else.
    """
    found = np.array([value for value in values if isfinite(value)], dtype=np.float64)
    if len(found) < 2:
        return None
    mean = float(found.mean())
    # Rounding leaves a spread of 1e-17 in equal values, and a t of 1e16.
    if np.ptp(found) <= 1e-12 * np.abs(found).max():
        return OneSided(len(found), float(not mean > 0.0), float(not mean < 0.0))
    t = mean / float(stats.sem(found))
    return OneSided(
        len(found), float(stats.t.sf(t, len(found) - 1)), float(stats.t.cdf(t, len(found) - 1))
    )


def show_equivalence(differences: Sequence[float], margin: float) -> Equivalence | None:
    """Return whether the mean difference is shown to lie within the margin.

    Args:
        differences: one per prompt.
        margin: above zero.

    Returns:
        None for fewer than two values.

    Source: Schuirmann 1987, doi:10.1007/BF01068419.
    """
    low = compare_with_zero([value + margin for value in differences])
    high = compare_with_zero([value - margin for value in differences])
    if low is None or high is None:
        return None
    return Equivalence(margin, max(low.above, high.below))


def correct_holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return the p-values that several tests have together, in their order.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    found, least = [0.0] * len(p_values), 0.0
    for done, index in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - done) * p_values[index]))
        found[index] = least
    return tuple(found)


def prompts_to_decide(values: Sequence[float], *, tests: int = 1) -> int | None:
    """Return how many prompts would tell the mean from zero, if mean and spread stay as they are.

    Args:
        values: one per prompt.
        tests: among how many tests Holm corrects.

    Returns:
        The least number at which a one-sided test decides four times in five; None where no
        number up to MOST_PROMPTS does, or fewer than two values tell no spread.
    """
    found = np.array([value for value in values if isfinite(value)], dtype=np.float64)
    if len(found) < 2 or not found.any():
        return None
    effect = abs(float(found.mean())) / max(float(found.std(ddof=1)), 1e-300)
    counts = np.arange(2, MOST_PROMPTS + 1)
    expected = stats.t.isf(ALPHA / tests, counts - 1) + stats.t.isf(1.0 - POWER, counts - 1)
    enough = effect * np.sqrt(counts) >= expected
    return int(counts[int(enough.argmax())]) if enough.any() else None
