"""Second moments of a running model: shared inputs, and steps that are replayed."""

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch import nn

from quantkit.bench.models.denoiser_inputs import make_inputs
from quantkit.calibration.moments import collect_hessians, timestep_weights
from quantkit.calibration.moments.moment_collector import MomentCollector
from quantkit.calibration.moments.shared_moments import SharedInputs, UnsharedInputError
from quantkit.pipelines import replayed_step as replaying
from quantkit.progress import silent
from quantkit.recipe.calibration import CalibrationRecipe
from tests.support.denoisers import tiny_denoiser
from tests.support.observed import Scheduler, layer_of
from tests.support.recording import capture_on_cpu, record_on_cpu

STEPS = (900.0, 600.0, 20.0)
#: what a step counts, another number for each
WEIGHTS = {900.0: 1.0, 600.0: 2.5, 20.0: 0.25}


def layers_of(model):
    return [
        layer_of(name, "linear" if isinstance(m, nn.Linear) else "conv2d", m.weight.shape)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear | nn.Conv2d)
    ]


def moments_of(name, *, share, recipe, device="cpu"):
    """Return the moments of a model's layers, and how many of them were summed up."""
    model = tiny_denoiser(name).eval().to(device, torch.float32 if device == "cpu" else torch.half)
    layers = layers_of(model)
    collector = MomentCollector("unet", model, layers, recipe, share=share)
    with torch.no_grad(), collector.attached(Scheduler(*STEPS), lambda _: None):
        for number, count in enumerate((2, 2, 1)):
            if number == 2:
                collector.hold_out(3)
            torch.manual_seed(number)
            given = make_inputs(model, count, 8, torch.device(device))
            for step in STEPS:
                model(**{**given, "timestep": torch.full((1,), step, device=device)})
    return {layer.name: collector.moments(layer.name) for layer in layers}, len(collector._sums)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_shared_and_replayed_moments_are_those_of_each_layer(name, share, monkeypatch):
    captured, recipe = [], CalibrationRecipe(row_share=share)

    def capture(run, device, pool):
        captured.append(run)
        return capture_on_cpu(run, device, pool)

    monkeypatch.setattr(timestep_weights, "step_weights", lambda *_: WEIGHTS)
    wanted, every = moments_of(name, share=False, recipe=recipe)
    assert every == len(wanted)
    record_on_cpu(monkeypatch, capture)
    found, some = moments_of(name, share=True, recipe=recipe)
    assert len(captured) == 1
    assert some < every
    for layer, moments in wanted.items():
        torch.testing.assert_close(found[layer].second, moments.second, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[layer].mean, moments.mean, rtol=1e-6, atol=1e-7)
        assert found[layer].rows == moments.rows
        assert torch.equal(found[layer].held.rows, moments.held.rows)
        assert torch.equal(found[layer].held.weights, moments.held.weights)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, sample, timestep):
        return self.linear(sample)


def test_a_second_expert_is_weighed_before_the_scheduler_takes_a_step():
    """Solvers keep what earlier steps answered: measured later they are refused, or wrong."""
    first, second, scheduler = Expert(), Expert(), UniPCMultistepScheduler()
    scheduler.set_timesteps(4)
    expected = timestep_weights.step_weights(scheduler, "schedule")
    layers = [layer_of("linear", "linear", (2, 3))]
    settings = CalibrationRecipe(weighting="schedule")
    collector = MomentCollector("second", second, layers, settings)
    sample = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    given = []
    with torch.no_grad(), collector.attached(scheduler, lambda _: None, [first]):
        for i, step in enumerate(scheduler.timesteps):
            given.append(sample)
            answer = (first if i < 2 else second)(sample, step)
            answer = torch.cat((answer, answer[:, :1]), dim=1)
            sample = scheduler.step(answer, step, sample, return_dict=False)[0]
    weights = [expected[float(step)] for step in scheduler.timesteps[2:]]
    pairs = list(zip(weights, given[2:], strict=True))
    mean = sum(w * x.sum(0) for w, x in pairs) / (5 * sum(weights))
    torch.testing.assert_close(collector.moments("linear").mean, mean)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_gpu_replays_them(share, monkeypatch, caplog):
    recipe = CalibrationRecipe(row_share=share)
    monkeypatch.setattr(timestep_weights, "step_weights", lambda *_: WEIGHTS)
    found, _ = moments_of("sd15", share=True, recipe=recipe, device="cuda")
    assert "not replayed" not in caplog.text
    monkeypatch.setattr(replaying, "_RECORDING", ())
    wanted, _ = moments_of("sd15", share=False, recipe=recipe, device="cuda")
    for layer, moments in wanted.items():
        largest = float(moments.second.abs().max())
        torch.testing.assert_close(found[layer].second, moments.second, rtol=0, atol=1e-4 * largest)
        assert found[layer].rows == moments.rows


class Reader(nn.Module):
    """Two layers that read the same until the second call."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, sample, timestep):
        self.calls += 1
        return self.one(sample) + self.other(sample if self.calls == 1 else sample + 1)


def watch(model, *, share):
    torch.manual_seed(0)
    collector = MomentCollector("unet", model, layers_of(model), CalibrationRecipe(), share=share)
    with torch.no_grad(), collector.attached(Scheduler(*STEPS), lambda _: None):
        for step in STEPS:
            model(torch.randn(2, 5, 8), torch.tensor(step))
    return collector


def test_layers_that_come_to_read_another_input_are_taken_apart(monkeypatch):
    monkeypatch.setattr(timestep_weights, "step_weights", lambda *_: WEIGHTS)
    with pytest.raises(UnsharedInputError):
        watch(Reader(), share=True)
    apart = watch(Reader(), share=False)
    assert apart.moments("one").rows == apart.moments("other").rows == 30
    assert not torch.equal(apart.moments("one").second, apart.moments("other").second)


def test_a_run_begins_again_where_inputs_turn_out_not_to_be_shared(monkeypatch):
    tried = []

    class Collector(MomentCollector):
        def attached(self, *given):
            tried.append(self._shared is not None)
            if tried[-1]:
                raise UnsharedInputError("other")
            return super().attached(*given)

    class Pipe:
        unet, scheduler = Reader(), Scheduler(*STEPS)

    monkeypatch.setattr(collect_hessians, "MomentCollector", Collector)
    monkeypatch.setattr(collect_hessians, "run_prompts", lambda *_: None)
    recipe = CalibrationRecipe(prompts=1, steps=3, buckets=1)
    run = collect_hessians._MomentRun(Pipe(), ("unet",), ["p"], recipe, hessians=None)
    run.observe("unet", (), "step", silent)
    assert tried == [True, False]


LINEAR, WIDE, POINT = nn.Linear(8, 4), nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 1)


@pytest.mark.parametrize(
    ("first", "second", "change", "shared"),
    [
        (LINEAR, LINEAR, lambda x: x, True),
        (LINEAR, LINEAR, lambda x: x.view(x.shape), True),
        (WIDE, WIDE, lambda x: x, True),
        (WIDE, POINT, lambda x: x, False),
        (LINEAR, POINT, lambda x: x, False),
        (LINEAR, LINEAR, lambda x: x.clone(), False),
        (LINEAR, LINEAR, lambda x: x.add_(1), False),
        (LINEAR, LINEAR, lambda x: x[:1], False),
    ],
    ids=["same", "view", "windows", "other windows", "kind", "copy", "written", "part"],
)
def test_layers_share_the_same_unchanged_input(first, second, change, shared):
    groups, x = SharedInputs(), torch.randn(2, 8, 8, 8)
    assert not groups.is_looked_at("a", first, x)
    assert groups.is_looked_at("b", second, change(x)) is shared
    assert groups.leader_of("b") == ("a" if shared else "b")


def test_prompts_are_shared_by_all_blocks_and_memory_that_is_used_again_is_not():
    groups, prompts, memory = SharedInputs(), torch.randn(2, 7, 8), np.zeros((2, 8, 9, 9), "f")
    picture = torch.from_numpy(memory)
    assert not groups.is_looked_at("k1", LINEAR, prompts)
    assert not groups.is_looked_at("conv1", WIDE, picture)
    assert groups.is_looked_at("short", WIDE, picture)
    del picture
    assert not groups.is_looked_at("conv2", WIDE, torch.from_numpy(memory))
    assert groups.is_looked_at("k2", LINEAR, prompts)
    groups.end_call()
    # Who was not there at first sums up for himself.
    assert not groups.is_looked_at("k1", LINEAR, prompts)
    assert not groups.is_looked_at("new", LINEAR, torch.randn(1, 8))
    with pytest.raises(UnsharedInputError):
        groups.end_call()
