"""The tests behind the gates, against scipy and published numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantkit.eval.measuring import equivalence
from quantkit.eval.measuring.equivalence import (
    ALPHA,
    MOST_PROMPTS,
    POWER,
    Equivalence,
    compare_with_zero,
    correct_holm,
    prompts_to_decide,
    show_equivalence,
)
from scipy import stats

from tests.support.comparisons import holm_by_closure


@pytest.mark.parametrize("spread", [1.0, 1e-3])
@pytest.mark.parametrize("count", [2, 5, 64])
def test_one_sided_tests_are_scipys(count, spread):
    values = np.random.default_rng(count).normal(0.3, spread, count)
    found = compare_with_zero(values.tolist())
    assert found.above == pytest.approx(
        stats.ttest_1samp(values, 0.0, alternative="greater").pvalue
    )
    assert found.below == pytest.approx(stats.ttest_1samp(values, 0.0, alternative="less").pvalue)


def test_equivalence_is_the_worse_of_scipys_two_tests():
    values = np.random.default_rng(0).normal(0.01, 0.1, 40)
    found = show_equivalence(values.tolist(), 0.05)
    expected = max(
        stats.ttest_1samp(values, -0.05, alternative="greater").pvalue,
        stats.ttest_1samp(values, 0.05, alternative="less").pvalue,
    )
    assert found.p == pytest.approx(expected)
    assert found.shown == (expected <= ALPHA)
    assert [Equivalence(0.05, p).shown for p in (ALPHA, ALPHA + 1e-9)] == [True, False]
    # What the tests show, the interval at twice the level shows too: both ends inside.
    low, high = stats.t.interval(1 - 2 * ALPHA, 39, loc=values.mean(), scale=stats.sem(values))
    assert found.shown == (low > -0.05 and high < 0.05)


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([], []),
        ([0.7, 0.6], [1.0, 1.0]),
        ([0.01, 0.04, 0.03, 0.005, 0.9], [0.04, 0.09, 0.09, 0.025, 0.9]),
        ([0.027181, 0.036475, 0.030332], [0.081543, 0.081543, 0.081543]),
        ([0.912756, 0.81327, 0.000826, 0.002049], [1.0, 1.0, 0.003304, 0.006147]),
        ([0.033586, 0.04287, 0.000137, 0.040793], [0.100758, 0.100758, 0.000548, 0.100758]),
    ],
)
def test_holm_is_that_of_statsmodels(p_values, expected):
    """statsmodels 0.15.0: ``multipletests(p_values, method="holm")[1]``."""
    assert correct_holm(p_values) == pytest.approx(expected)
    assert holm_by_closure(p_values) == pytest.approx(expected)


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.025, 1.0])), max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    assert correct_holm(p_values) == pytest.approx(holm_by_closure(p_values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0] * 4, (0.0, 1.0)),
        ([-0.1] * 3, (1.0, 0.0)),
        ([0.0] * 8, (1.0, 1.0)),
        ([0.1 + 0.2, 0.3], (0.0, 1.0)),
    ],
    ids=["above", "below", "at zero", "equal but for rounding"],
)
def test_equal_values_have_no_doubt(values, expected):
    found = compare_with_zero(values)
    assert (found.above, found.below) == expected


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [math.inf, 2.0]])
def test_fewer_than_two_values_show_nothing(values):
    assert compare_with_zero(values) is None
    assert show_equivalence(values, 1.0) is None
    assert prompts_to_decide(values) is None


def test_so_many_prompts_decide_four_times_in_five():
    rng = np.random.default_rng(4)
    sample = rng.normal(0.0, 1.0, 30)
    sample = (sample - sample.mean()) / sample.std(ddof=1) + 0.3
    count = prompts_to_decide(sample.tolist())
    # The normal approximation, (z(0.975) + z(0.8))^2 / 0.3^2 = 87.2, and a few for the t.
    assert 87 <= count <= 92
    decided = sum(
        compare_with_zero(rng.normal(0.3, 1.0, count).tolist()).above <= ALPHA for _ in range(400)
    )
    # 400 draws: a standard error of 0.02
    assert decided / 400 == pytest.approx(POWER, abs=0.06)
    assert prompts_to_decide(sample.tolist(), tests=3) > count


def spread_around(mean, count=12):
    """Return values with a standard deviation of one."""
    values = np.random.default_rng(5).normal(0.0, 1.0, count)
    return ((values - values.mean()) / values.std(ddof=1) + mean).tolist()


@pytest.mark.parametrize("tests", [1, 3])
@pytest.mark.parametrize("effect", [0.2, 0.5, -0.7, 1.0, 1.3, -2.0, 2.9, 6.0])
def test_prompts_to_decide_are_those_of_the_noncentral_t(effect, tests):
    """The power of a t-test at an effect is a tail of the noncentral t: exact, and no sum."""
    counts = np.arange(2, 400)
    limit = stats.t.isf(ALPHA / tests, counts - 1)
    power = stats.nct.sf(limit, counts - 1, abs(effect) * np.sqrt(counts))
    expected = counts[(power >= POWER).argmax()]
    assert prompts_to_decide(spread_around(effect), tests=tests) == expected


def test_the_most_prompts_may_be_asked_for_and_not_one_more(monkeypatch):
    needed = prompts_to_decide(spread_around(0.5))
    monkeypatch.setattr(equivalence, "MOST_PROMPTS", needed)
    assert prompts_to_decide(spread_around(0.5)) == needed
    monkeypatch.setattr(equivalence, "MOST_PROMPTS", needed - 1)
    assert prompts_to_decide(spread_around(0.5)) is None


def test_no_number_of_prompts_decides_a_mean_on_the_limit():
    assert prompts_to_decide([-1.0, 1.0]) is None
    assert prompts_to_decide([0.0] * 8) is None
    assert prompts_to_decide([1.0] * 8) == 2
    assert prompts_to_decide([1.0, -0.99999]) is None
    assert MOST_PROMPTS >= 1000


def test_equivalence_is_rarely_shown_at_the_margin():
    rng = np.random.default_rng(6)
    wrong = sum(
        show_equivalence(rng.normal(0.05, 0.02, 12).tolist(), 0.05).shown for _ in range(400)
    )
    assert wrong / 400 <= 0.045
    right = sum(
        show_equivalence(rng.normal(0.0, 0.02, 12).tolist(), 0.05).shown for _ in range(100)
    )
    assert right >= 95
