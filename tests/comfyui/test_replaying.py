"""Replaying steps of ComfyUI's denoisers, recorded on the CPU."""

import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.numerics.formats import INT8
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from tests.comfyui.test_operations import weight_of
from tests.support.comparisons import is_near
from tests.support.fake_comfy import make_module
from tests.support.recording import record_on_cpu

pytestmark = pytest.mark.usefixtures("comfy_sd", "on_cpu")

SCHEME = Scheme(INT8, PerChannel(), None, Activation.TOKEN)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the CPU record."""
    record_on_cpu(monkeypatch)


class Denoiser(nn.Module):
    """Two packed layers, called as ComfyUI calls a model: it writes to what it is given."""

    def __init__(self, operations):
        super().__init__()
        self.dense = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.5)
        self.first = make_module(operations, self.dense)
        self.second = make_module(operations, self.dense)

    def forward(self, x, timesteps, context=None, control=None, transformer_options={}):  # noqa: B006  ComfyUI's
        transformer_options["block"] = ("double", 0)
        y = self.first(x) * timesteps[:, None, None].cos()
        y = self.dropout(self.second(nn.functional.silu(y)))
        return y + control["output"].pop() if control is not None else y


def packed_denoiser(scheme, surroundings):
    from quantkit.comfyui.operations import make_operations

    torch.manual_seed(0)
    with torch.inference_mode():
        model = Denoiser(make_operations(surroundings)).eval()
        state = dict(model.state_dict())
        for name in ("first", "second"):
            state[f"{name}.weight"] = weight_of(scheme, model.dense)
            state[f"{name}.bias"] = torch.randn(64)
        model.load_state_dict(state)
    return model


@pytest.fixture
def denoiser():
    """A denoiser of ComfyUI whose steps are replayed, and what counts them."""
    from quantkit.comfyui.operations import Surroundings
    from quantkit.comfyui.replaying import replay_steps

    surroundings = Surroundings()
    model = packed_denoiser(SCHEME, surroundings)
    forward = replay_steps(model, torch.device("cpu"))
    surroundings.changes = forward.forget
    return model, forward


def call(model, *, seed=0, control=None, **options: Any):
    """Call a denoiser as ComfyUI's sampling does."""
    g = torch.Generator().manual_seed(seed)
    given = {
        "cond_or_uncond": [1, 0], "uuids": [uuid.uuid4()], "wrappers": {},
        "callbacks": {"on_detach_after": {None: [print]}}, "sigmas": torch.ones(1), **options,
    }  # fmt: skip
    with torch.inference_mode():
        x, t = torch.randn(2, 5, 64, generator=g), torch.randn(2, generator=g)
        return model(x, t, context=None, control=control, transformer_options=given)


def own(model, **given):
    """Return what the model answers module by module."""
    forward = vars(model).pop("forward")
    try:
        return call(model, **given)
    finally:
        vars(model)["forward"] = forward


def counts(forward):
    return forward.replayed.recorded, forward.replayed.replayed


def test_steps_are_replayed_with_their_own_numbers(denoiser):
    model, forward = denoiser
    expected = [own(model, seed=seed) for seed in range(3)]
    found = [call(model, seed=seed) for seed in range(3)]
    assert all(map(is_near, found, expected))
    assert not torch.equal(found[0], found[1])
    assert counts(forward) == (1, 2)
    assert not forward.replayed.eager


@pytest.mark.parametrize(("token_below", "recorded"), [(None, 1), (0.3, 2)])
def test_replayed_steps_have_the_scales_of_their_timestep(token_below, recorded):
    from quantkit.comfyui.loading import _find_buckets, _timestep
    from quantkit.comfyui.operations import Surroundings
    from quantkit.comfyui.replaying import replay_steps

    static = Scheme(INT8, PerChannel(), None, Activation.STATIC, (-0.5, 0.5))
    scheme = replace(static, token_below=token_below)
    buckets = {scheme.schedule: TimestepBuckets(scheme.schedule)}
    model = packed_denoiser(scheme, Surroundings(buckets))
    _find_buckets(model, buckets, partial(_timestep, None))
    times = [torch.full((2,), time) for time in (0.9, 0.0, -0.9, 0.4)]
    x = torch.randn(2, 5, 64)
    with torch.inference_mode():
        expected = [model(x, time) for time in times]
        forward = replay_steps(model, torch.device("cpu"))
        found = [model(x, time) for time in times]
    assert all(map(is_near, found, expected))
    assert counts(forward) == (recorded, len(times) - recorded)


def test_layers_between_packed_ones_are_fused_in_inference_mode(denoiser, caplog):
    # torch hands composite operators, dropout among them, to modes in inference mode.
    model, _ = denoiser
    with caplog.at_level("INFO", logger="quantkit.pipelines"):
        call(model)
    assert "every call of the step is kept" not in caplog.text


def test_a_controlnet_gives_other_tensors_each_step(denoiser):
    model, forward = denoiser
    controls = [{"output": [torch.full((2, 5, 64), float(step))]} for step in range(3)]
    plain = own(model)
    for step, control in enumerate(controls):
        assert is_near(call(model, control=control), plain + step)
    assert counts(forward) == (1, 2)
    assert controls[0]["output"], "ComfyUI's own list is left alone"


def test_a_patch_of_other_nodes_runs_eagerly(denoiser):
    model, forward = denoiser
    expected = own(model)
    for _ in range(2):
        found = call(model, patches={"attn1_patch": [lambda q, k, v, _: (q, k, v)]})
        assert torch.equal(found, expected)
    assert counts(forward) == (0, 0)
    assert list(forward.replayed.eager) == ["an argument is a function"]


def test_a_lora_that_changes_weights_is_in_the_next_step(denoiser):
    model, forward = denoiser
    plain = call(model)
    call(model)
    dense = model.first.convert_weight(model.first.weight)
    model.first.set_weight(2 * dense)
    patched = call(model)
    assert not is_near(patched, plain)
    assert is_near(patched, own(model))
    assert counts(forward) == (2, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "weight_function", [lambda w: 2 * w]), "patched"),
        (lambda layer: setattr(layer, "weight_lowvram_function", lambda w: 2 * w), "patched"),
        (lambda layer: setattr(layer, "bias_function", [lambda b: 2 * b]), "patched"),
        (lambda layer: setattr(layer, "forward", lambda x: 2 * x), "Bypass"),
    ],
    ids=["function", "lowvram", "bias", "bypass"],
)
def test_what_changes_products_at_each_call_is_not_recorded(denoiser, change, reason):
    model, forward = denoiser
    call(model)
    change(model.first)
    expected = own(model)
    assert all(torch.equal(call(model), expected) for _ in range(2))
    assert counts(forward) == (1, 0)
    (eager,) = forward.replayed.eager
    assert reason in eager


def test_offloaded_weights_end_a_recording_and_free_it(denoiser):
    model, forward = denoiser
    call(model)
    steps = forward._step._graphs._steps
    assert steps
    model.second.to("meta")
    assert not steps, "what was recorded would keep the weights on the card"


def test_weights_elsewhere_are_not_recorded(denoiser):
    model, forward = denoiser
    model.dense.to("meta")  # called by nothing
    assert torch.equal(call(model), own(model))
    assert forward.replayed.eager == {"weights are offloaded": 1}


@pytest.mark.parametrize("replay", [True, False])
def test_the_loader_replays_where_it_is_told_to(packed, replay):
    from quantkit.comfyui.loading import load_model

    patcher = load_model(packed("sd3-buckets"), replay=replay)
    denoiser = patcher.model.diffusion_model
    assert patcher.is_static == replay
    (buckets,) = patcher.options["custom_operations"].Linear.surroundings.buckets.values()
    denoiser(torch.zeros(1), torch.tensor([900.0]), context=None)
    assert int(buckets.index) == 2, "the bucket is found before the step"
