"""The moving average of amax over calls."""

from dataclasses import replace

import pytest
import torch

from quantkit.calibration.statistics.batch_peaks import peaks_by_batch
from quantkit.calibration.statistics.input_measure import measure
from quantkit.calibration.statistics.moving_average import (
    continued,
    known_share,
    one_by_one,
    step_averages,
    without_start,
)
from quantkit.calibration.statistics.observers import OBSERVERS
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


@pytest.mark.parametrize("steps", [[0, 3], [1, 0], [4, 2]])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_average_over_batches_at_once_is_that_of_one_after_another(steps, batches):
    generator = torch.Generator().manual_seed(batches)
    values = [
        torch.rand(batches, count, generator=generator, dtype=torch.float64) for count in steps
    ]
    before, start = [2.0, 3.0, 1.0], filtered([2.0, 3.0, 1.0])
    running = torch.zeros(2, batches, dtype=torch.float64)
    for bucket, found in enumerate(values):
        for now in found.unbind(1):
            step_averages([running[bucket]], [now])
    average = torch.full((2,), start * float(known_share(torch.tensor(3))), dtype=torch.float64)
    found = without_start(one_by_one(average, running, steps), 3 + batches * torch.tensor(steps))
    wanted = [filtered([*before, *v.flatten().tolist()]) for v in values]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1), (4, 4, 2)])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_peaks_of_batches_are_those_of_their_prompts(sizes, parts):
    """With guidance a batch stands in an input twice: all prompts without it, then all with."""
    prompts = sum(sizes)
    x = torch.rand(parts * prompts, 5, 8, generator=torch.Generator().manual_seed(prompts))
    everywhere = torch.rand(1, 8)
    inputs = [measure(x, -1, peaks=True), measure(everywhere, -1), measure(-2 * x, -1, peaks=True)]
    one, shared, twice = peaks_by_batch(inputs, sizes)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    for batch, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        mine = x.unflatten(0, (parts, prompts))[:, end - size : end]
        assert float(one[batch]) == float(mine.amax())
        assert float(twice[batch]) == float(2 * mine.amax())
    assert shared.tolist() == [float(everywhere.amax())] * len(sizes)
    x[prompts - 1, 0, 0] = torch.nan
    (one,) = peaks_by_batch([measure(x, -1, peaks=True)], sizes)
    assert one.isnan().tolist() == [False] * (len(sizes) - 1) + [True]


def test_pooled_average_weighs_buckets_by_their_calls():
    statistics = replace(
        statistics_of(sample("gaussian"), sample("heavy"), sample("relu")),
        moving_amax=torch.tensor([2.0, 5.0, 7.0], dtype=torch.float64),
        updates=torch.tensor([1, 3, 0]),
    )
    pooled = statistics.regrouped([0, 0, 1])
    assert pooled.moving_amax.tolist() == [17 / 4, 0.0]
    assert pooled.updates.tolist() == [4, 0]
