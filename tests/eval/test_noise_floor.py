"""What a packed pipeline adds to the noise floors, by the tests of the pairs."""

import numpy as np
import pytest
from quantkit.eval.judging.noise_floor import Floor, measure_gaps
from scipy import stats

from tests.support.comparisons import comparison, holm_by_closure


def made(seed, shift=0.0):
    rng = np.random.default_rng(seed)
    ssim, lpips, mse = (rng.normal(mean, 0.01, 12) for mean in (0.9, 0.1, 0.02))
    return comparison((ssim - shift).tolist(), lpips=(lpips + shift).tolist(), mse=mse.tolist())


def test_p_values_are_corrected_over_all_metrics_and_floors():
    packed, floors = made(0, shift=0.006), (made(1), made(2))
    gaps = measure_gaps(packed, tuple(Floor("dtype", str(f), floor, None) for f, floor in
                                      enumerate(floors)))  # fmt: skip
    alone = [
        stats.ttest_rel(packed.scores[name].values, floor.scores[name].values).pvalue
        for floor in floors
        for name in packed.scores
    ]
    found = [gap.tests[name].p_differs for gap in gaps for name in packed.scores]
    assert found == pytest.approx(holm_by_closure(alone))
    assert sum(p < 0.05 for p in alone) > sum(p < 0.05 for p in found)


def test_equivalence_is_tested_where_a_metric_has_a_margin():
    packed, floor = made(0), made(1)
    (gap,) = measure_gaps(packed, (Floor("dtype", "", floor, None),), {"ssim": 0.05})
    pairs = np.subtract(packed.scores["ssim"].values, floor.scores["ssim"].values)
    expected = max(
        stats.ttest_1samp(pairs, -0.05, alternative="greater").pvalue,
        stats.ttest_1samp(pairs, 0.05, alternative="less").pvalue,
    )
    assert gap.tests["ssim"].equivalence.p == pytest.approx(expected)
    assert gap.tests["lpips"].equivalence is None
