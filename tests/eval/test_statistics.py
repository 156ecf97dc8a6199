"""Summaries, intervals and paired differences against numpy and scipy."""

import math

import numpy as np
import pytest
from quantkit.eval.measuring.sample_statistics import (
    Interval,
    bootstrap_loss,
    bootstrap_mean,
    relative_loss,
    subtract_pairs,
    summarize,
    summarize_difference,
)


def test_summary_equals_numpy():
    values = np.random.default_rng(0).normal(3, 1, 17).tolist()
    found = summarize(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values, ddof=1))
    assert (found.minimum, found.maximum) == (min(values), max(values))
    assert found.median == pytest.approx(np.median(values))
    assert found.interval.low < found.mean < found.interval.high
    assert found.interval.method == "BCa"
    assert found == summarize(values)


def test_interval_covers_the_mean_as_often_as_it_says():
    """95 % intervals of 20 normal values cover the mean in about 19 of 20 draws."""
    rng = np.random.default_rng(5)
    inside = sum(
        i.low <= 0.0 <= i.high for i in (bootstrap_mean(rng.normal(0, 1, 20)) for _ in range(60))
    )
    assert 50 <= inside <= 60


def test_interval_agrees_with_the_t_interval_on_many_values():
    from scipy import stats

    values = np.random.default_rng(2).normal(10, 2, 200)
    low, high = stats.t.interval(0.95, 199, loc=values.mean(), scale=stats.sem(values))
    found = bootstrap_mean(values)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.03), pytest.approx(high, abs=0.03))


def test_paired_difference_equals_scipy_on_pairs():
    from scipy import stats

    rng = np.random.default_rng(4)
    before = rng.normal(0.9, 0.05, 24)
    after = before - rng.gamma(2, 0.01, 24)
    expected = stats.bootstrap(
        (after, before), lambda a, b, axis: (a - b).mean(axis=axis), paired=True, method="BCa",
        n_resamples=9999, random_state=np.random.default_rng(20_240_501),
    ).confidence_interval  # fmt: skip
    found = summarize_difference(after.tolist(), before.tolist())
    assert found.mean == pytest.approx(after.mean() - before.mean())
    assert (found.interval.low, found.interval.high) == pytest.approx(tuple(expected), rel=1e-9)
    # Twice as wide and more without the pairs: what they are for.
    apart = stats.bootstrap(
        (after, before), lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        method="percentile", n_resamples=9999, random_state=np.random.default_rng(20_240_501),
    ).confidence_interval  # fmt: skip
    assert apart.high - apart.low > 2 * (found.interval.high - found.interval.low)


def test_paired_difference_leaves_out_pairs_with_infinite_values():
    found = summarize_difference(
        [math.inf, 30.0, math.inf, 40.0], [math.inf, math.inf, 20.0, 38.0], infinite_note="infinite"
    )
    assert (found.count, found.mean, found.interval) == (4, 2.0, None)
    assert found.note == "3 of 4 infinite, left out"
    with pytest.raises(ValueError, match="zip"):
        summarize_difference([1.0], [1.0, 2.0])


def test_an_interval_holds_its_bounds():
    interval = Interval(-0.5, 0.25, "BCa")
    assert [interval.holds(v) for v in (-0.5, 0.0, 0.25, -0.51, 0.26)] == [True] * 3 + [False] * 2


def test_degenerate_samples_have_honest_summaries():
    one = summarize([0.5])
    assert (one.mean, one.std, one.interval) == (0.5, None, None)
    equal = summarize([0.5] * 4)
    assert (equal.interval.low, equal.interval.high) == (0.5, 0.5)
    assert equal.interval.method == "all values equal"
    none = summarize([])
    assert (none.count, none.mean, none.interval) == (0, None, None)
    two = summarize([1.0, 2.0])
    assert two.std == pytest.approx(0.5**0.5)
    assert 1.0 <= two.interval.low <= two.interval.high <= 2.0


def test_infinite_values_are_left_out_and_counted():
    found = summarize([math.inf, 30.0, 40.0], infinite_note="pairs identical (infinite)")
    assert (found.count, found.mean, found.maximum) == (3, 35.0, 40.0)
    assert found.note == "1 of 3 pairs identical (infinite), left out"
    assert summarize([math.inf] * 2).mean is None


def test_relative_loss_of_means():
    before, after = np.array([20.0, 30.0]), np.array([19.0, 30.0])
    assert relative_loss(before, after) == pytest.approx(2.0)
    assert relative_loss(-before, after) is None
    assert bootstrap_loss(-before, after) is None
    assert bootstrap_loss(before, 0.98 * before).method == "all values equal"
    rng = np.random.default_rng(0)
    many = rng.normal(30, 3, 40)
    interval = bootstrap_loss(many, many * 0.99 + rng.normal(0, 0.1, 40))
    assert interval.low < 1.0 < interval.high
    assert interval.high - interval.low < 0.5


@pytest.mark.parametrize("lost", [0.2, 1e-5])
def test_the_interval_of_the_loss_is_scipys_of_pairs(lost):
    from scipy import stats

    rng = np.random.default_rng(6)
    before = rng.normal(28.0, 2.0, 20)
    after = before - rng.gamma(2.0, lost, 20)
    expected = stats.bootstrap(
        (before, after), lambda b, a, axis: 100.0 - 100.0 * a.mean(axis=axis) / b.mean(axis=axis),
        paired=True, method="BCa", n_resamples=9999,
        random_state=np.random.default_rng(20_240_501),
    ).confidence_interval  # fmt: skip
    found = bootstrap_loss(before, after)
    assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-6)
    assert found.low < relative_loss(before, after) < found.high


def test_a_difference_with_an_infinite_side_is_infinite():
    inf = float("inf")
    assert subtract_pairs([1.0, inf, inf, 2.0], [inf, 1.0, inf, 5.0]) == [inf, inf, inf, -3.0]
