"""Hooks on running modules: what they count, name and leave behind."""

import numpy as np
import pytest
import torch

from quantkit.calibration.observing.hooks import Collector
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.errors import ModelError, NonFiniteError, RecipeError
from quantkit.models.timestep import bucket_of, split_schedule
from quantkit.numerics.histogram import BINS
from tests.support.observed import LAYERS, Denoiser, Scheduler, layer_of, observe, statistics_of


def test_statistics_are_those_of_the_inputs():
    inputs = [(torch.randn(2, 4, 5, 6) * (i + 1), float(t)) for i, t in enumerate((9, 7, 5, 3))]
    collector = observe(inputs)
    assert collector.edges == (6.0,)
    assert collector.calls == [2, 2]
    found = collector.statistics()["early"]
    rows = [x.movedim(1, -1).reshape(-1, 4) for x, _ in inputs]
    wanted = statistics_of(torch.cat(rows[2:]), torch.cat(rows[:2]))
    for field in ("amax", "histogram", "channel_amax", "count"):
        assert torch.equal(getattr(found, field), getattr(wanted, field)), field
    torch.testing.assert_close(found.second_moment, wanted.second_moment, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_calls():
    def size(collector):
        sums = collector._sums.values()
        tensors = [t for s in sums for t in vars(s).values() if torch.is_tensor(t)]
        return sum({t.data_ptr(): t.numel() for t in tensors}.values())

    few = observe([(torch.randn(1, 4, 2, 2), float(t)) for t in (4, 3)])
    many = observe([(torch.randn(8, 4, 9, 9), float(t)) for t in range(50, 0, -1)])
    # Per bucket the channels' amax, sum and squares, a histogram and an average.
    assert size(few) == size(many) == 2 * (3 * 4 + BINS + 1 + 3 * 8 + BINS + 1)
    for collector in (few, many):
        shapes = {name: tuple(s.sample.rows.shape) for name, s in collector._sums.items()}
        assert shapes == {"early": (2, SAMPLE_ROWS, 36), "late": (2, SAMPLE_ROWS, 8)}


@pytest.mark.parametrize("step", [1, 3], ids=["first", "last"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_value_that_is_not_finite_names_layer_and_step(step, value):
    inputs = [(torch.randn(1, 4, 3, 3), float(t)) for t in (30, 20, 10)]
    inputs[step - 1][0][0, 2, 1, 1] = value
    with pytest.raises(NonFiniteError, match=rf"unet\.early: NaN or Inf .* at step {step} ") as e:
        observe(inputs)
    assert f"(timestep {40 - 10 * step})" in str(e.value)


def test_value_that_comes_up_inside_names_the_layer_that_reads_it():
    torch.manual_seed(0)
    denoiser = Denoiser()
    denoiser.early.bias.data[3] = torch.nan
    collector = Collector("unet", denoiser, LAYERS, 1)
    with (
        torch.no_grad(),
        pytest.raises(NonFiniteError, match=r"unet\.late: NaN"),
        collector.attached(Scheduler(5.0), lambda calls: None),
    ):
        denoiser(torch.randn(1, 4, 3, 3), 5.0)
    assert not denoiser._forward_pre_hooks


def test_hooks_are_gone_when_the_work_fails():
    denoiser = Denoiser()
    collector = Collector("unet", denoiser, LAYERS, 1)
    with pytest.raises(KeyError), collector.attached(Scheduler(5.0), lambda calls: None):
        raise KeyError
    assert not any(module._forward_pre_hooks for module in denoiser.modules())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layer_of("none", "linear", (8, 8)), "the model that was built has no module none"),
        (layer_of("late", "conv2d", (8, 8, 1, 1)), "late: found Linear, expected Conv2d"),
        (layer_of("late", "linear", (8, 9)), r"late: found Linear, .* \(8, 9\)"),
    ],
    ids=["missing", "kind", "shape"],
)
def test_module_that_is_not_as_the_file_says_is_refused(layer, message):
    with pytest.raises(ModelError, match=message):
        Collector("unet", Denoiser(), [layer], 1)


@pytest.mark.parametrize("unit", [1.0, 1e-3], ids=["SD", "Flux"])
@pytest.mark.parametrize(("steps", "buckets"), [(4, 1), (4, 4), (20, 4), (28, 3), (7, 4)])
def test_schedule_is_split_evenly_in_the_denoisers_unit(steps, buckets, unit):
    timesteps = torch.linspace(999, 31, steps).tolist()
    edges = split_schedule(Scheduler(*timesteps), timesteps[0] * unit, buckets)
    counts = np.bincount([bucket_of(t * unit, edges) for t in timesteps], minlength=buckets)
    assert len(edges) == buckets - 1
    assert counts.max() - counts.min() <= 1


def test_repeated_timesteps_count_once():
    # The second-order and pseudo-numerical schedulers visit timesteps twice.
    assert split_schedule(Scheduler(9.0, 7.0, 7.0, 5.0, 5.0, 3.0), 9.0, 2) == (6.0,)


def test_schedule_that_cannot_be_split_is_refused():
    with pytest.raises(RecipeError, match="buckets 3: the schedule has 2 steps"):
        split_schedule(Scheduler(2.0, 1.0), 2.0, 3)
    with pytest.raises(ModelError, match="called with timestep 0, but the scheduler says 999"):
        split_schedule(Scheduler(999.0, 1.0), 0.0, 2)


def test_bucket_without_a_call_is_refused():
    denoiser = Denoiser()
    collector = Collector("unet", denoiser, LAYERS, 2)
    with torch.no_grad(), collector.attached(Scheduler(9.0, 1.0), lambda calls: None):
        denoiser(torch.randn(1, 4, 3, 3), 9.0)
    with pytest.raises(ModelError, match="no call fell into timestep bucket 0"):
        collector.statistics()
