"""The moving average of amax over calls."""

from dataclasses import replace

import pytest
import torch

from quantkit.calibration.moving_average import continued
from quantkit.calibration.observers import OBSERVERS
from quantkit.numerics.formats import FORMATS
from tests.support.observed import filtered, observe, sample, statistics_of


def test_average_is_that_of_a_recursive_filter():
    loud = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    timesteps = (9.0, 8.0, 2.0, 1.0, 9.0, 8.0, 2.0, 1.0)
    inputs = []
    for amax, t in zip(loud, timesteps, strict=True):
        x = torch.rand(2, 4, 3, 3) * amax / 2
        x[0, 1, 2, 0] = -amax
        inputs.append((x, t))
    found = observe(inputs).statistics()["early"]
    wanted = [filtered([loud[i] for i in calls]) for calls in ((2, 3, 6, 7), (0, 1, 4, 5))]
    assert found.moving_amax.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found.updates.tolist() == [4, 4]
    assert float(OBSERVERS["moving_average"](found, FORMATS["e5m2"], 0.0)[0]) == (
        pytest.approx(wanted[0], rel=1e-6)
    )


@pytest.mark.parametrize("cut", range(8))
def test_average_goes_on_from_where_it_was(cut):
    loud = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    ends = [filtered(part) if part else 0.0 for part in (loud[:cut], loud[cut:])]
    first, second = (torch.tensor([end], dtype=torch.float64) for end in ends)
    joined = continued(first, torch.tensor([cut]), second, torch.tensor([7 - cut]))
    assert float(joined) == pytest.approx(filtered(loud), rel=1e-12)


def test_pooled_average_weighs_buckets_by_their_calls():
    statistics = replace(
        statistics_of(sample("gaussian"), sample("heavy"), sample("relu")),
        moving_amax=torch.tensor([2.0, 5.0, 7.0], dtype=torch.float64),
        updates=torch.tensor([1, 3, 0]),
    )
    pooled = statistics.regrouped([0, 0, 1])
    assert pooled.moving_amax.tolist() == [17 / 4, 0.0]
    assert pooled.updates.tolist() == [4, 0]
