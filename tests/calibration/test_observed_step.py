"""Steps that are replayed while they are observed: the same statistics, or observed as ever."""

import logging

import pytest
import torch

from quantkit.bench.models.denoiser_inputs import make_inputs
from quantkit.calibration.observing.hooks import Collector
from quantkit.calibration.statistics.sampling import draw_candidates
from quantkit.pipelines import recorded_step
from quantkit.pipelines import replayed_step as replaying
from tests.support.denoisers import tiny_denoiser
from tests.support.observed import LAYERS, Denoiser, Scheduler, layer_of
from tests.support.recording import capture_on_cpu, record_on_cpu

STEPS = (900.0, 600.0, 500.0, 20.0)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the CPU record; the list counts the captures."""
    captured = []

    def capture(run, device, pool):
        captured.append(run)
        return capture_on_cpu(run, device, pool)

    record_on_cpu(monkeypatch, capture)
    return captured


def layers_of(model):
    """Return some layers of every kind of block; queries, keys and values among them."""
    return [
        layer_of(
            name, "linear" if isinstance(module, torch.nn.Linear) else "conv2d", module.weight.shape
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    ]


def batches_of(model):
    """Return the arguments of batches of four steps, the last one of fewer prompts."""
    for number, count in enumerate((2, 2, 1)):
        torch.manual_seed(number)
        given = make_inputs(model, count, 8, torch.device("cpu"))
        latents = next(iter(given))
        yield [
            {
                **given,
                latents: torch.randn_like(given[latents]) * (i + 1),
                "timestep": torch.full((1,), t),
            }
            for i, t in enumerate(STEPS)
        ]


def watched(name, errors_from=None):
    """Return the sums of a collector, and the answers that it left alone."""
    model = tiny_denoiser(name).eval()
    collector = Collector("unet", model, layers_of(model), 2, errors_from=errors_from)
    answers = []
    with torch.no_grad(), collector.attached(Scheduler(*STEPS), lambda _: None):
        for number, calls in enumerate(batches_of(model)):
            prompts = len(next(iter(calls[0].values())))
            collector.begin_batch(range(number, number + prompts), (1,) * prompts)
            answers += [model(**call)[0] for call in calls]
            collector.check()
    assert "forward" not in vars(model)
    return collector, answers


@pytest.mark.parametrize(("name", "errors_from"), [("sd15", None), ("sd3", None), ("flux", 1)])
def test_replayed_steps_give_the_same_statistics(name, errors_from, on_cpu, monkeypatch):
    replayed, answers = watched(name, errors_from)
    # One recording for each number of prompts.
    assert len(on_cpu) == 2
    monkeypatch.setattr(replaying, "_RECORDING", ())
    plain, wanted = watched(name, errors_from)
    assert len(on_cpu) == 2
    assert all(map(torch.equal, answers, wanted))
    assert replayed.calls == plain.calls
    for taken in (Collector.taken, Collector.taken_attention):
        found, right = taken(replayed), taken(plain)
        assert list(found) == list(right)
        for layer, sums in right.items():
            for field, value in sums.items():
                assert torch.equal(found[layer][field], value), (layer, field)


def test_rows_of_the_next_step_are_drawn_while_this_one_runs(on_cpu, monkeypatch):
    drawn, choose = [], Collector.choose

    def counted(collector, buffers):
        before = draw_candidates.cache_info().misses
        found = choose(collector, buffers)
        drawn.append(draw_candidates.cache_info().misses > before)
        return found

    monkeypatch.setattr(Collector, "choose", counted)
    draw_candidates.cache_clear()
    watched("sd3")
    # Of each batch's launches the first one draws: batches of new shapes are recorded before.
    assert drawn == [True, False, False, True, False, False, False, True, False, False]


def observe(denoiser, before=lambda: None):
    """Run a denoiser of two layers over the schedule, and return its statistics."""
    collector = Collector("unet", denoiser, LAYERS, 2)
    torch.manual_seed(3)
    with torch.no_grad(), collector.attached(Scheduler(*STEPS), lambda _: None):
        before()
        for t in STEPS:
            denoiser(torch.randn(2, 4, 3, 3), torch.tensor(t))
    return collector.statistics()


class Twice(Denoiser):
    def forward(self, sample, timestep):
        return self.late(super().forward(sample, timestep))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.late.register_forward_hook(lambda *_: None), "late has hooks"),
        (lambda d: setattr(d.late, "_hf_hook", object()), "late is offloaded"),
        (lambda d: setattr(d, "__class__", Twice), "called twice in one step"),
    ],
    ids=["hook", "offload", "twice"],
)
def test_what_cannot_be_recorded_is_observed_as_ever(change, reason, on_cpu, caplog, monkeypatch):
    def denoiser():
        torch.manual_seed(0)
        found = Denoiser().eval()
        change(found)
        return found

    with caplog.at_level(logging.WARNING):
        found = observe(denoiser())
    assert reason in caplog.text
    assert len(caplog.records) == 1
    assert not on_cpu
    monkeypatch.setattr(replaying, "_RECORDING", ())
    wanted = observe(denoiser())
    for layer, statistics in wanted.items():
        for field, value in vars(statistics).items():
            assert torch.equal(getattr(found[layer], field), value), (layer, field)


def test_a_failing_capture_counts_its_call_once(on_cpu, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded_step, "capture", fail)
    torch.manual_seed(0)
    found = observe(Denoiser().eval())
    monkeypatch.setattr(replaying, "_RECORDING", ())
    torch.manual_seed(0)
    wanted = observe(Denoiser().eval())
    assert "cannot be recorded: operation not permitted" in caplog.text
    for layer, statistics in wanted.items():
        assert torch.equal(found[layer].count, statistics.count)
        assert torch.equal(found[layer].samples, statistics.samples)
