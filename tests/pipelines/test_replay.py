"""Replaying: what is recorded, when it is not good any more, and what runs as ever."""

import copy
import gc
import pickle
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import quantkit
from quantkit.errors import InputError
from quantkit.pipelines import model_snapshot, recorded_step
from quantkit.pipelines import replayed_step as replaying
from quantkit.pipelines.model_snapshot import Snapshot
from tests.support.comparisons import is_near
from tests.support.denoisers import output_of, tiny_denoiser
from tests.support.recording import capture_on_cpu, record_on_cpu


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the CPU record."""
    record_on_cpu(monkeypatch)


@pytest.fixture
def unet():
    return tiny_denoiser("sdxl").eval()


def _arguments(size=8, batch=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    added = {"text_embeds": torch.randn(batch, 32, generator=g), "time_ids": torch.ones(batch, 6)}
    return {
        "sample": torch.randn(batch, 4, size, size, generator=g),
        "timestep": torch.tensor(7 + seed),
        "encoder_hidden_states": torch.randn(batch, 5, 64, generator=g),
        "added_cond_kwargs": added,
    }


def _call(model, **changed):
    with torch.no_grad():
        return model(**{**_arguments(), **changed}).sample


def _counts(found):
    (only,) = found.denoisers.values()
    return only.recorded, only.replayed


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux"])
def test_replayed_answers_are_the_models_own(name, on_cpu):
    model = tiny_denoiser(name).eval()
    wanted = output_of(name, model)
    found = quantkit.replay(model)
    answers = [output_of(name, model) for _ in range(3)]
    assert all(is_near(y, wanted) for y in answers)
    assert _counts(found) == (1, 2)


def test_each_step_has_its_own_numbers_and_answers_stay(unet, on_cpu):
    wanted = [_call(unet, **_arguments(seed=seed)) for seed in range(4)]
    found = quantkit.replay(unet)
    answers = [_call(unet, **_arguments(seed=seed)) for seed in range(4)]
    assert all(map(is_near, answers, wanted))
    assert _counts(found) == (1, 3)


@pytest.mark.parametrize(
    "changed",
    [
        _arguments(size=16),
        _arguments(batch=1),
        {"return_dict": False},
        {"encoder_hidden_states": torch.randn(2, 9, 64)},
        {"cross_attention_kwargs": {"scale": 0.5}},
        {"sample": _arguments()["sample"].to(memory_format=torch.channels_last)},
    ],
    ids=["size", "batch", "tuple", "tokens", "scale", "layout"],
)
def test_other_arguments_are_another_step(unet, on_cpu, changed):
    found = quantkit.replay(unet)
    _call(unet)
    with torch.no_grad():
        unet(**{**_arguments(), **changed})
    assert _counts(found) == (2, 0)


def test_a_timestep_may_be_a_number_or_positional(unet, on_cpu):
    a = _arguments()
    rest = {"added_cond_kwargs": a["added_cond_kwargs"]}
    with torch.no_grad():
        wanted = [unet(a["sample"], t, a["encoder_hidden_states"], **rest).sample for t in (7, 8)]
        found = quantkit.replay(unet)
        answers = [unet(a["sample"], t, a["encoder_hidden_states"], **rest).sample for t in (7, 8)]
    assert all(map(is_near, answers, wanted))
    assert _counts(found) == (1, 1)


def _move(model):
    model.conv_in.weight.data = model.conv_in.weight.data.clone()


def _replace(model):
    model.conv_in = copy.deepcopy(model.conv_in)


def _freeu(model):
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def _processors(model):
    from diffusers.models.attention_processor import AttnProcessor

    model.set_attn_processor(AttnProcessor())


def _fuse(model):
    model.fuse_qkv_projections()


def _lora(model):
    from peft import LoraConfig

    model.add_adapter(LoraConfig(target_modules=["to_q"], init_lora_weights=False))


CHANGES = [_move, _replace, _freeu, _processors, _fuse, _lora]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_model_is_recorded_again(unet, on_cpu, change):
    found = quantkit.replay(unet)
    _call(unet)
    change(unet)
    answer = _call(unet)
    assert _counts(found) == (2, 0)
    quantkit.replay(unet, enabled=False)
    assert is_near(answer, _call(unet))


@pytest.fixture
def launches(monkeypatch):
    """One entry for each launch of a recording."""
    made = []

    def capture(*args):
        found = capture_on_cpu(*args)
        return replace(found, launch=lambda: (made.append(1), found.launch()))

    monkeypatch.setattr(recorded_step, "capture", capture)
    return made


@pytest.fixture
def released(monkeypatch):
    """How many bytes torch says that it gave back."""
    total = [4096]
    monkeypatch.setattr(model_snapshot, "_released", lambda _: total[0])
    return total


@pytest.mark.parametrize("more", [0, 1], ids=["kept", "given back"])
def test_a_moved_model_is_not_launched_where_memory_was_given_back(
    unet, on_cpu, launches, released, more
):
    """What is launched in vain reads memory that is there: else the device would stop working."""
    found = quantkit.replay(unet)
    _call(unet)
    before = unet.conv_out.weight.data
    unet.conv_out.weight.data = before * 2
    released[0] += more
    launches.clear()
    answer = _call(unet)
    # A new recording is launched once to be compared.
    assert len(launches) == 2 - more
    assert _counts(found) == (2, 0)
    launches.clear()
    released[0] += 1
    assert is_near(_call(unet), answer)
    assert (len(launches), _counts(found)) == (1, (2, 1))
    quantkit.replay(unet, enabled=False)
    assert is_near(answer, _call(unet))


def test_a_step_that_is_thrown_away_is_not_counted(unet, on_cpu, launches):
    found = quantkit.replay(unet)
    _call(unet)
    launches.clear()
    _watch(unet)
    _call(unet)
    assert (len(launches), _counts(found)) == (1, (1, 0))
    assert "1 eager: mid_block has hooks" in str(found)


def test_memory_is_freed_when_it_is_switched_off(unet, on_cpu):
    """At once: what a model is compared with refers to the model."""
    quantkit.replay(unet)
    _call(unet)
    (step,) = vars(unet)["forward"]._graphs._steps.values()
    gone = weakref.ref(step.inputs[0])
    del step
    gc.disable()
    try:
        quantkit.replay(unet, enabled=False)
        assert gone() is None
    finally:
        gc.enable()


def test_what_refers_to_itself_is_collected(unet, on_cpu):
    quantkit.replay(unet)
    _call(unet)
    (step,) = vars(unet)["forward"]._graphs._steps.values()
    gone = weakref.ref(step.inputs[0])
    del step, vars(unet)["forward"]
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_step_is_recorded(enabled):
    def fail():
        assert not gc.isenabled()
        raise RuntimeError("in the body")

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="in the body"), recorded_step.without_collection():
            fail()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_an_adapters_weight_is_looked_at(unet, on_cpu):
    _lora(unet)
    found = quantkit.replay(unet)
    before = _call(unet)
    unet.set_adapters(["default"], [0.25])
    assert not torch.equal(before, _call(unet))
    unet.disable_adapters()
    assert not torch.equal(before, _call(unet))
    assert _counts(found) == (3, 0)


def test_numbers_that_change_in_place_need_no_recording(unet, on_cpu):
    found = quantkit.replay(unet)
    before = _call(unet)
    with torch.no_grad():
        unet.conv_out.bias.add_(1.0)
    # A recorded bias is added in the convolution: the sums round elsewhere.
    torch.testing.assert_close(_call(unet), before + 1.0, atol=1e-5, rtol=0)
    assert _counts(found) == (1, 1)


def test_only_the_latest_steps_are_kept(unet, on_cpu, monkeypatch):
    monkeypatch.setattr(replaying, "MOST", 2)
    found = quantkit.replay(unet)
    for batch in (1, 2, 1, 3, 1, 2):
        _call(unet, **_arguments(batch=batch))
    assert _counts(found) == (4, 2)


def _watch(model):
    model.mid_block.register_forward_hook(lambda *_: None)


def _train(model):
    model.train()


def _offload(model):
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(model.mid_block, ModelHook())


@pytest.mark.parametrize(
    ("change", "why"),
    [(_watch, "mid_block has hooks"), (_train, "training"), (_offload, "offloaded")],
)
def test_what_cannot_be_recorded_runs_as_ever_and_says_why(unet, on_cpu, change, why):
    change(unet)
    wanted = _call(unet)
    found = quantkit.replay(unet)
    assert is_near(_call(unet), wanted)
    assert is_near(_call(unet), wanted)
    assert _counts(found) == (0, 0)
    (only,) = found.denoisers.values()
    assert list(only.eager.values()) == [2]
    assert why in str(found)


def test_gradients_run_as_ever(unet, on_cpu):
    found = quantkit.replay(unet)
    unet(**_arguments()).sample.sum().backward()
    assert unet.conv_in.weight.grad is not None
    assert "gradients are enabled" in str(found)


def test_a_hook_that_is_gone_is_recorded(unet, on_cpu):
    handle = unet.mid_block.register_forward_hook(lambda *_: None)
    found = quantkit.replay(unet)
    _call(unet)
    handle.remove()
    _call(unet)
    _call(unet)
    assert _counts(found) == (1, 1)


def test_what_fails_to_be_recorded_is_tried_once(unet, on_cpu, monkeypatch):
    tries = []

    def fail(*_):
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    wanted = _call(unet)
    monkeypatch.setattr(recorded_step, "capture", fail)
    found = quantkit.replay(unet)
    assert all(is_near(_call(unet), wanted) for _ in range(3))
    assert len(tries) == 1
    assert "3 eager: cannot be recorded: operation not permitted" in str(found)


def test_a_recording_that_answers_otherwise_is_dropped(unet, on_cpu, monkeypatch):
    def capture(*args):
        found = capture_on_cpu(*args)
        return replace(found, launch=found.output.sample.zero_)

    wanted = _call(unet)
    monkeypatch.setattr(recorded_step, "capture", capture)
    found = quantkit.replay(unet)
    assert all(is_near(_call(unet), wanted) for _ in range(2))
    assert "2 eager: cannot be recorded: its answer is another one" in str(found)


def test_an_argument_that_is_no_value_runs_as_ever(unet, on_cpu):
    class Scale(float):
        pass

    found = quantkit.replay(unet)
    with torch.no_grad():
        unet(**_arguments(), cross_attention_kwargs={"scale": Scale(1.0)})
        unet(**_arguments(), cross_attention_kwargs={"ip": object()})
    assert "1 eager: an argument is a object" in str(found)


def test_without_a_gpu_steps_run_as_ever(unet):
    wanted = _call(unet)
    found = quantkit.replay(unet)
    assert is_near(_call(unet), wanted)
    assert "1 eager: on cpu, which records nothing" in str(found)


def test_a_second_thread_runs_as_ever(unet, on_cpu):
    found = quantkit.replay(unet)
    _call(unet)
    inside, done = threading.Event(), threading.Event()
    step = vars(unet)["forward"]

    def hold():
        with step._graphs.alone():
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    _call(unet)
    done.set()
    thread.join()
    assert "1 eager: another thread" in str(found)


def test_off_gives_the_forward_back(unet, on_cpu):
    import inspect

    before = inspect.signature(unet.forward)
    quantkit.replay(unet)
    quantkit.replay(unet)
    assert inspect.signature(unet.forward) == before
    assert str(quantkit.replay(unet, enabled=False)) == ""
    assert "forward" not in vars(unet)


def test_copies_and_pickles_record_their_own(unet, on_cpu):
    quantkit.replay(unet)
    wanted = _call(unet)
    for other in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        assert vars(other)["forward"]._model is other
        assert is_near(_call(other), wanted)
        assert vars(other)["forward"].replayed.recorded == 1


def test_it_takes_what_denoises():
    with pytest.raises(InputError, match="dict has no denoiser; pass a pipeline"):
        quantkit.replay({})


def test_a_snapshot_sees_what_lists_and_dicts_hold():
    model: Any = torch.nn.Linear(2, 2)
    model.numbers, model.table = [1.5], {"a": 2.5}
    assert Snapshot(model).holds()
    for change in (
        lambda: model.numbers.__setitem__(0, 2.5),
        lambda: model.table.update(a=7.5),
        lambda: model.table.update(b=1),
        lambda: model.register_forward_hook(lambda *_: None),
        lambda: model.register_buffer("more", torch.ones(1)),
        lambda: model.to(torch.float64),
        lambda: setattr(model, "new", 1),
    ):
        snapshot = Snapshot(model)
        change()
        assert not snapshot.holds()
        assert Snapshot(model).holds()
