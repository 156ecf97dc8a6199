"""Gates: their limits, and what they say of values at the limit."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from quantkit.eval.judging.gates import (
    Compression,
    Limits,
    State,
    find_compression,
    judge,
    passed,
    state_of,
)
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import Comparison, Score, compare
from quantkit.eval.measuring.equivalence import (
    ALPHA,
    compare_with_zero,
    correct_holm,
    prompts_to_decide,
)
from quantkit.eval.measuring.metrics import METRICS
from quantkit.eval.measuring.sample_statistics import Interval, summarize
from scipy import stats

from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.comparisons import clip_scores, comparison, holm_by_closure
from tests.support.pictures import fake_clip, made_pairs, small_lpips

ONLY = Limits(0.5, None, None)
QUANTIZED = Compression.QUANTIZED


def judged(values, *, limit):
    """The gate on the mean SSIM of made values."""
    score = Score(METRICS["ssim"], "", tuple(values), summarize(list(values)))
    names = tuple(map(str, range(len(values))))
    found = Comparison(names, None, {"ssim": score}, None)
    return judge(found, replace(ONLY, ssim=limit), QUANTIZED)[0]


def scheme(*, sparse):
    return Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR if sparse else None, Activation.TOKEN)


@pytest.mark.parametrize(
    ("sparse", "compression", "limit"),
    [
        ((False,), Compression.QUANTIZED, 1.0),
        ((True,), Compression.BOTH, 3.0),
        ((False, True), Compression.BOTH, 3.0),
    ],
)
def test_the_clip_gate_follows_from_the_schemes(sparse, compression, limit):
    found = find_compression([scheme(sparse=s) for s in sparse])
    assert found is compression
    assert Limits().clip_loss(found) == limit
    assert Limits().clip_loss(Compression.SPARSE) == 2.0


def test_margins_are_the_distance_of_gates_from_identical_pictures():
    assert Limits().margins == {"ssim": pytest.approx(0.05), "lpips": 0.1}
    assert Limits(ssim=None, lpips=None).margins == {}
    assert Limits(ssim=1.0, lpips=0.0).margins == {}
    assert Limits(ssim=1.5, lpips=-0.1).margins == {}


def test_gates_compare_the_mean_strictly():
    comparison = compare(made_pairs(8, prompts=("a",) * 8), Backbones(small_lpips(), fake_clip()))
    ssim = comparison.scores["ssim"].summary
    at = judge(
        comparison,
        Limits(ssim=ssim.mean, lpips=9.0, clip=50.0, broken=None),
        Compression.QUANTIZED,
    )
    below = judge(
        comparison, Limits(ssim=-0.9, lpips=9.0, clip=50.0, broken=None), Compression.QUANTIZED
    )
    above = judge(
        comparison, Limits(ssim=1.0, lpips=9.0, clip=50.0, broken=None), Compression.QUANTIZED
    )
    assert [gate.state for gate in at] == [State.UNDECIDED, State.PASSED, State.PASSED]
    assert [gate.passed for gate in at] == [None, True, True]
    assert state_of(at) is State.UNDECIDED
    assert not passed(at)
    assert passed(below)
    assert state_of(above) is State.FAILED
    assert below[1].title == "LPIPS [two stages]"
    assert below[2].expected == "< 50 %"


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_few_prompts_pass_nothing(count):
    pairs = made_pairs(count)
    good = judge(compare(replace(pairs, packed=pairs.original), Backbones()), ONLY, QUANTIZED)
    assert good[0].state is State.UNDECIDED
    bad = judge(compare(pairs, Backbones()), replace(ONLY, ssim=1.5), QUANTIZED)
    assert bad[0].state is (State.FAILED if count > 1 else State.UNDECIDED)


def test_a_gate_never_fails_inside_its_interval_nor_passes():
    """The t-test of skewed values may decide where their bootstrap interval does not."""
    rng = np.random.default_rng(0)
    states = Counter()
    for _ in range(80):
        values = 1.0 - rng.lognormal(-3.5, 1.0, 12)
        gate = judged(values, limit=float(values.mean() + rng.normal(0, 0.02)))
        if gate.interval.holds(gate.limit):
            assert gate.state is State.UNDECIDED
            assert gate.prompts_needed is None or gate.prompts_needed > len(values)
        states[gate.state] += 1
    assert min(states[state] for state in (State.PASSED, State.FAILED, State.UNDECIDED)) > 5


@pytest.mark.parametrize("skew", ["normal", "long tail of bad pictures"])
def test_error_rates_hold_at_the_limit(skew):
    """At the limit itself one in forty passes and fails; a long tail passes more often."""
    rng, count = np.random.default_rng(1), 100
    found = Counter()
    for _ in range(count):
        if skew == "normal":
            values = rng.normal(0.95, 0.02, 16)
        else:
            values = 0.95 - (rng.gamma(2.0, 0.02, 16) - 0.04)
        found[judged(values, limit=0.95).state] += 1
    assert found[State.FAILED] <= 0.05 * count
    assert found[State.PASSED] <= (0.05 if skew == "normal" else 0.08) * count


def test_failures_are_corrected_over_the_gates():
    """Of many gates at their limits one fails by chance; Holm makes that one in forty again."""
    rng, alone, together = np.random.default_rng(2), 0, 0
    for _ in range(150):
        columns = [rng.normal(0.0, 1.0, 16).tolist() for _ in range(8)]
        tests = [compare_with_zero(column) for column in columns]
        alone += any(test.below <= ALPHA for test in tests)
        together += any(p <= ALPHA for p in correct_holm([test.below for test in tests]))
    assert alone > 15
    assert together <= 9


#: Values of 12 prompts, whose means lie beyond the gates' limits, near enough for doubt.
SSIM = [0.95 + 0.01 * n for n in (-3, 1, -2, -1, -4, 2, -1, -3, 1, -2, 0, -3)]
LPIPS = [0.1 + 0.01 * n for n in (2, -1, 3, 0, 4, -1, 1, 2, -1, 3, 0, 5)]
BEFORE = [28.0, 31.0, 25.5, 30.0, 27.0, 29.5, 26.0, 33.0, 28.5, 24.0, 30.5, 27.5]
LOST = (0.2, 1.1, -0.4, 0.9, 0.6, -0.1, 0.8, 0.3, 0.7, -0.2, 0.5, 0.45)


@pytest.mark.parametrize("better", [False, True], ids=["beyond the limits", "within the limits"])
def test_p_values_are_scipys_and_failures_are_corrected(better):
    """Each of two gates alone would fail: Holm's correction leaves them undecided."""
    sign = -1 if better else 1
    ssim, lpips = [0.95 + sign * (s - 0.95) for s in SSIM], [0.1 + sign * (p - 0.1) for p in LPIPS]
    after = [before - sign * lost for before, lost in zip(BEFORE, LOST, strict=True)]
    found = comparison(ssim, lpips=lpips, clip=clip_scores(BEFORE, after))
    gates = judge(found, Limits(clip=1.0, broken=None), QUANTIZED)
    margins = [
        np.subtract(ssim, 0.95),
        np.subtract(0.1, lpips),
        np.subtract(after, np.multiply(0.99, BEFORE)),
    ]
    passes, fails = (
        [stats.ttest_1samp(values, 0.0, alternative=side).pvalue for values in margins]
        for side in ("greater", "less")
    )
    assert [gate.p_passes for gate in gates] == pytest.approx(passes)
    assert [gate.p_fails for gate in gates] == pytest.approx(holm_by_closure(fails))
    if better:
        assert [gate.state for gate in gates] == [State.PASSED] * 3
        return
    assert max(fails[:2]) < ALPHA < min(holm_by_closure(fails))
    assert [gate.state for gate in gates] == [State.UNDECIDED] * 3
    needed = [prompts_to_decide(values.tolist(), tests=3) for values in margins]
    assert [gate.prompts_needed for gate in gates] == needed


def test_a_gate_that_may_yet_pass_asks_for_the_prompts_of_one_test():
    ssim = [0.951 + 0.004 * n for n in (-2, 3, 1, -1, 0, 2, -3, 1, 2, -1)]
    found = comparison(ssim, lpips=[0.5 + s for s in ssim])
    gate, _ = judge(found, Limits(clip=None, broken=None), QUANTIZED)
    margins = np.subtract(ssim, 0.95).tolist()
    assert gate.state is State.UNDECIDED
    assert gate.prompts_needed == prompts_to_decide(margins) < prompts_to_decide(margins, tests=2)


@pytest.mark.parametrize(
    ("lost", "state"), [(0.5, State.PASSED), (1.0, State.UNDECIDED), (1.5, State.FAILED)]
)
def test_the_clip_gate_decides_on_either_side_of_its_limit(lost, state):
    """The limit is 1 %."""
    shares = [1.0 - (lost + 0.05 * (-1) ** i) / 100.0 for i in range(len(BEFORE))]
    after = [before * share for before, share in zip(BEFORE, shares, strict=True)]
    found = comparison([1.0] * len(BEFORE), clip=clip_scores(BEFORE, after))
    gate = judge(found, Limits(None, None, clip=1.0, broken=None), QUANTIZED)[0]
    assert (gate.found, gate.state) == (pytest.approx(lost, abs=0.01), state)


def test_prompts_are_asked_for_only_where_the_gate_is_open():
    rng = np.random.default_rng(3)
    values = rng.normal(0.953, 0.01, 12)
    gate = judged(values, limit=0.95)
    assert gate.state is State.UNDECIDED
    assert gate.prompts_needed > 12
    more = rng.normal(values.mean(), values.std(ddof=1), 2 * gate.prompts_needed)
    assert judged(more, limit=0.95).state is State.PASSED
    assert judged(values, limit=0.5).prompts_needed is None


@pytest.mark.parametrize(
    ("limit", "p", "decided"),
    [(0.949, "p_passes", State.PASSED), (0.958, "p_fails", State.FAILED)],
)
def test_a_p_value_at_the_level_decides(limit, p, decided, monkeypatch):
    values = [0.953 + 0.002 * n for n in (-2, 3, 1, -1, 0, 2, -3, 1, 2, -1, -2, 1)]
    level = getattr(judged(values, limit=limit), p)
    assert 0.0 < level < ALPHA
    for alpha, state in ((level, decided), (0.999 * level, State.UNDECIDED)):
        monkeypatch.setattr("quantkit.eval.judging.gates.ALPHA", alpha)
        assert judged(values, limit=limit).state is state


def test_more_prompts_are_asked_for_than_an_open_gate_has():
    """The tests would decide, and the interval, of a skew that 12 values do not show, does not."""
    values = [0.96 + 0.001 * n for n in (-2, 3, 1, -1, 0, 2, -3, 1, 2, -1, -2, 1)]
    wide = replace(summarize(values), interval=Interval(0.94, 0.98, "BCa"))
    score = Score(METRICS["ssim"], "", tuple(values), wide)
    found = Comparison(tuple(map(str, range(12))), None, {"ssim": score}, None)
    gate = judge(found, replace(ONLY, ssim=0.95), QUANTIZED)[0]
    assert gate.p_passes < ALPHA
    assert (gate.state, gate.prompts_needed) == (State.UNDECIDED, 13)


def test_a_gate_that_was_not_measured_neither_passes_nor_fails():
    gates = judge(compare(made_pairs(8), Backbones()), Limits(ssim=-0.9), Compression.QUANTIZED)
    assert [gate.passed for gate in gates] == [True, None, None]
    assert gates[1].note == "not measured"
    assert passed(gates)
    assert not passed(gates[1:])
    assert (
        judge(compare(made_pairs(), Backbones()), Limits(None, None, None), Compression.QUANTIZED)
        == ()
    )


def test_a_clip_score_that_is_not_positive_is_not_judged():
    pairs = made_pairs(prompts=("a",) * 4)
    comparison = compare(pairs, Backbones(clip=fake_clip()))
    worthless = replace(
        comparison, clip=replace(comparison.clip, loss=replace(comparison.clip.loss, mean=None))
    )
    gate = judge(worthless, Limits(), Compression.QUANTIZED)[2]
    assert (gate.passed, gate.note) == (None, "the original's score is not positive")
