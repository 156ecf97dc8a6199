"""Second moments: what layers read, rows held out, the directory, resuming, the command."""

import json
import re
from contextlib import contextmanager
from types import SimpleNamespace

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from quantkit.calibration.moments import collect_hessians as collecting
from quantkit.calibration.moments.collect_hessians import collect_hessians
from quantkit.calibration.moments.held_out_rows import HELD_ROWS, HeldRows, held_bytes, hold_out
from quantkit.calibration.moments.moment_collector import MomentCollector
from quantkit.calibration.moments.moment_files import INDEX, KIND, Hessians, load_hessians
from quantkit.calibration.moments.moment_sums import MomentSum
from quantkit.calibration.moments.moments import group_layers, moment_bytes
from quantkit.calibration.observing.collect import layers_to_pack
from quantkit.cli.hessian_command import hessian as command
from quantkit.errors import (
    ArtefactError,
    ModelError,
    NonFiniteError,
    OutputError,
    PromptError,
    RecipeError,
)
from quantkit.models.source import open_model
from quantkit.pipelines import running
from quantkit.pipelines.running import load_pipeline, run_prompts
from quantkit.progress import silent
from quantkit.recipe.load import change_recipe, load_recipe
from quantkit.storage.places import check_directory
from tests.support.moments import add_input
from tests.support.observed import TwoAtOnce
from tests.support.pipelines import tiny_flux_pipeline, tiny_pipeline, tiny_transformer

PROMPTS = ("a red square", "a blue disc", "two rings")

GIB = 2**30


def test_windows_are_taken_in_parts_when_they_are_many(monkeypatch):
    module = nn.Conv2d(4, 4, 3, padding=1)
    x = torch.randn(5, 4, 6, 6)
    whole, parts = MomentSum(module, "layer", 1.0, 0), MomentSum(module, "layer", 1.0, 0)
    add_input(whole, x, 1.0)
    monkeypatch.setattr("quantkit.calibration.moments.input_windows._WINDOW_ELEMENTS", 10)
    add_input(parts, x, 1.0)
    torch.testing.assert_close(parts.moments().second, whole.moments().second)


def test_a_share_of_the_rows_estimates_all_of_them():
    module = nn.Linear(8, 4)
    x = torch.randn(1, 20_000, 8, generator=torch.Generator().manual_seed(1))
    some, again, everything = (MomentSum(module, "layer", share, 3) for share in (0.2, 0.2, 1.0))
    for total in (some, again, everything):
        add_input(total, x, 1.0)
    assert some.moments().rows == 4000
    assert torch.equal(some.moments().second, again.moments().second)
    torch.testing.assert_close(some.moments().second, everything.moments().second, rtol=0, atol=0.1)


@pytest.mark.parametrize(("tokens", "rows"), [(9, 9 * 3), (40, 16 * 3), (400, 100 * 3)])
def test_a_share_leaves_small_pictures_enough_rows(tokens, rows):
    total = MomentSum(nn.Linear(8, 4), "layer", 0.25, 0)
    add_input(total, torch.randn(3, tokens, 8), 1.0)
    assert total.moments().rows == rows


@pytest.mark.parametrize("module", [nn.Linear(6, 4), nn.Conv2d(6, 4, 3)], ids=["linear", "conv"])
def test_rows_that_are_held_are_not_summed(module):
    total = MomentSum(module, "layer", 1.0, 0)
    shape = (3, 6, 5, 5) if isinstance(module, nn.Conv2d) else (3, 9, 6)
    seen, held = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)).unbind()
    add_input(total, seen, 1.0)
    total.hold(held, 2.0, 4)
    total.hold(held, 0.5, 100)
    moments = total.moments()
    assert moments.rows == 27
    assert moments.held.rows.dtype == torch.bfloat16
    assert moments.held.weights.tolist() == [2.0] * 12 + [0.5] * 27
    everything = MomentSum(module, "layer", 1.0, 0)
    add_input(everything, held, 1.0)
    # All rows of a call, so their power is that of its moments, but for bfloat16.
    weight, bias = torch.randn(4, moments.held.rows.shape[1]), torch.randn(4)
    whole = HeldRows(moments.held.rows[12:], moments.held.weights[12:])
    for given in (None, bias):
        wanted = everything.moments().power(weight, given)
        assert whole.power(weight, given) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("k", [1, 320])
def test_held_rows_take_what_guidance_makes_of_512_in_16_bit(k):
    assert held_bytes(k) == 512 * 2 * torch.bfloat16.itemsize * k


def test_progress_counts_calls_up_to_the_steps_of_all_batches(monkeypatch):
    """Of 7 prompts 2 are held out: three batches of at most 2, and one, of 3 steps each."""

    class Collector:
        hold_out = moments = begin_batch = print

        def __init__(self, *_, **__):
            self.attached = attached

    @contextmanager
    def attached(_, report, others):
        for calls in (1, 2, 12, 13):
            report(calls)
        yield

    monkeypatch.setattr(collecting, "MomentCollector", Collector)
    monkeypatch.setattr(collecting, "run_prompts", lambda *_: None)
    pipe = SimpleNamespace(scheduler=SimpleNamespace(timesteps=[3, 2, 1]), unet=None)
    told = []
    settings = recipe_with(buckets=1).calibration
    run = collecting._MomentRun(pipe, ("unet",), ["p"] * 7, settings, hessians=None)
    run.observe("unet", (), "step", lambda *about: told.append(about))
    assert told == [("step", calls, 12) for calls in (1, 2, 12, 12)]


def test_every_call_of_the_denoiser_is_counted_once():
    class Denoiser(nn.Module):
        def forward(self, sample, timestep):
            return sample

    denoiser, told = Denoiser(), []
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(4)
    settings = recipe_with(buckets=1).calibration
    collector = MomentCollector("unet", denoiser, (), settings)
    with collector.attached(scheduler, told.append):
        for step in scheduler.timesteps:
            denoiser(torch.zeros(1), step)
    denoiser(torch.zeros(1), scheduler.timesteps[0])
    assert told == [1, 2, 3, 4]


def test_held_rows_weigh_as_their_timesteps_do():
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).bfloat16()
    held = HeldRows(rows, torch.tensor([3.0, 1.0]))
    weight = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    # |W x|^2 is 1 and 8
    assert held.power(weight, None) == pytest.approx((3 * 1 + 8) / 4)
    assert held.power(weight, torch.tensor([1.0, 0.0])) == pytest.approx((3 * 4 + 13) / 4)
    factor = torch.tensor([2.0, 0.5])
    smoothed = held.smoothed(factor)
    assert smoothed.power(weight / factor, None) == pytest.approx((3 * 1 + 8) / 4)


@pytest.mark.parametrize(
    ("count", "held"), [(1, 0), (3, 0), (4, 2), (8, 2), (16, 2), (24, 3), (64, 8)]
)
def test_the_last_prompts_are_held_out(count, held):
    prompts = tuple(map(str, range(count)))
    fitted, rest = hold_out(prompts)
    assert (*fitted, *rest) == prompts
    assert len(rest) == held


def test_padding_that_is_not_of_zeros_is_refused():
    total = MomentSum(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "unet.odd", 1.0, 0)
    with pytest.raises(ModelError, match=r"unet\.odd: padding .* mode reflect"):
        add_input(total, torch.randn(1, 4, 5, 5), 1.0)


def test_nan_is_named():
    total = MomentSum(nn.Linear(4, 4), "unet.bad", 1.0, 0)
    add_input(total, torch.tensor([[1.0, float("nan"), 0, 0]]), 1.0)
    with pytest.raises(NonFiniteError, match=r"unet\.bad: NaN or Inf"):
        total.moments()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(str(tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model")))


def recipe_with(**settings):
    return change_recipe(
        load_recipe("fp8"),
        {
            "calibration.prompts": 3,
            "calibration.steps": 3,
            "calibration.batch": 2,
            **{f"calibration.{n}": v for n, v in settings.items()},
        },
    )


def take(model, output, recipe=None, memory=GIB):
    recipe = recipe or recipe_with(buckets=1)
    return collect_hessians(
        model, recipe, PROMPTS, output, memory=memory, device="cpu", progress=silent
    )


@pytest.fixture(scope="module")
def taken(model, tmp_path_factory):
    return take(model, tmp_path_factory.mktemp("hessians") / "all")


def two_groups(model):
    """Return the memory that cuts the layers into two groups."""
    return 0.6 * sum(map(moment_bytes, layers_to_pack(model.components[0], recipe_with(buckets=1))))


def raw_inputs(model, names, settings):
    """Return what layers read, by a hook of this test's own."""
    pipe = load_pipeline(model, torch.device("cpu"))
    seen = {name: [] for name in names}
    for name in names:
        module = pipe.unet.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args, n=name: seen[n].append(args[0].clone()))
    run_prompts(pipe, PROMPTS, settings)
    return seen


def test_stored_moments_are_those_of_the_raw_inputs(model, taken):
    component = model.components[0]
    layers = {layer.name: layer for layer in layers_to_pack(component, recipe_with(buckets=1))}
    linear = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    conv = "down_blocks.0.resnets.0.conv1"
    seen = raw_inputs(model, (linear, conv), recipe_with(buckets=1).calibration)
    x = torch.cat([v.reshape(-1, v.shape[-1]) for v in seen[linear]])
    moments = taken.read(component, layers[linear])
    assert moments.rows == len(x)
    torch.testing.assert_close(moments.second, x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments.mean, x.mean(0), rtol=1e-4, atol=1e-5)
    first = torch.cat(seen[conv])
    windows = functional.pad(first, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    rows = windows.permute(0, 2, 3, 4, 5, 1).reshape(-1, layers[conv].k)
    moments = taken.read(component, layers[conv])
    torch.testing.assert_close(moments.second, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)


def test_rows_of_the_last_prompts_are_stored_and_not_summed(model, taken, tmp_path):
    more = (*PROMPTS, "a green cross", "dots")
    settings = recipe_with(buckets=1, prompts=5)
    found = collect_hessians(
        model, settings, more, tmp_path / "h", memory=GIB, device="cpu", progress=silent
    )
    assert (taken.index.held_out, found.index.held_out) == (0, 2)
    component = model.components[0]
    pipe, seen = load_pipeline(model, torch.device("cpu")), []
    name = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    pipe.unet.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    later = settings.calibration.model_copy(update={"seed": settings.calibration.seed + 3})
    run_prompts(pipe, more[3:], later)
    read = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).bfloat16()
    for layer in layers_to_pack(component, settings):
        alone, both = taken.read(component, layer), found.read(component, layer)
        assert alone.held is None
        torch.testing.assert_close(both.second, alone.second, rtol=1e-5, atol=1e-6)
        assert 0 < len(both.held.rows) <= 2 * HELD_ROWS + 3 * 4
        if layer.name == name:
            assert len(both.held.rows) == len(read)
            stored, wanted = (x.float().T @ x.float() for x in (both.held.rows, read))
            torch.testing.assert_close(stored, wanted, rtol=1e-2, atol=1e-1)


def test_batches_at_once_give_the_same_moments(model, taken, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "GrowingBatches", TwoAtOnce)
    told, settings = [], recipe_with(buckets=1, batch=1)
    found = collect_hessians(
        model, settings, PROMPTS, tmp_path / "h", memory=GIB, device="cpu",
        progress=lambda *now: told.append(now),
    )  # fmt: skip
    # Of three steps each: two prompts at once, and one.
    assert [now[1:] for now in told] == [(calls, 9) for calls in (2, 4, 6, 7, 8, 9)]
    component = model.components[0]
    for layer in layers_to_pack(component, settings):
        alone, both = taken.read(component, layer), found.read(component, layer)
        assert both.rows == alone.rows
        torch.testing.assert_close(both.second, alone.second, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(both.mean, alone.mean, rtol=1e-4, atol=1e-5)


def test_every_layer_that_is_packed_has_a_file(model, taken):
    wanted = {layer.name for layer in layers_to_pack(model.components[0], recipe_with(buckets=1))}
    assert set(taken.digests_of(model.components[0])) == wanted
    assert load_hessians(taken.path).missing == ()
    index = json.loads((taken.path / INDEX).read_text())
    assert (index["prompts"], index["steps"], index["weighting"]) == (3, 3, "uniform")


def test_groups_and_batches_change_nothing_but_rounding(model, taken, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(
        collecting, "run_prompts", lambda *args: (runs.append(1), run_prompts(*args))
    )
    parts = take(model, tmp_path / "parts", memory=two_groups(model))
    assert len(runs) == 2
    for layer in layers_to_pack(model.components[0], recipe_with(buckets=1)):
        a, b = (h.read(model.components[0], layer) for h in (taken, parts))
        torch.testing.assert_close(a.second, b.second, rtol=1e-5, atol=1e-6)


def test_a_killed_run_goes_on(model, taken, tmp_path, monkeypatch):
    output = tmp_path / "killed"
    count = [0]

    def killed(*args):
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        run_prompts(*args)

    monkeypatch.setattr(collecting, "run_prompts", killed)
    with pytest.raises(KeyboardInterrupt):
        take(model, output, memory=two_groups(model))
    done = {path: path.stat().st_mtime_ns for path in output.rglob("*.safetensors")}
    assert done
    with pytest.raises(ArtefactError, match=r"unfinished: .* calibrate hessian"):
        load_hessians(output)
    monkeypatch.undo()
    finished = take(model, output)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items())
    layer = layers_to_pack(model.components[0], recipe_with(buckets=1))[-1]
    a, b = (h.read(model.components[0], layer) for h in (taken, finished))
    torch.testing.assert_close(a.second, b.second, rtol=1e-5, atol=1e-6)


def test_a_finished_run_does_not_run_again(model, taken, monkeypatch):
    monkeypatch.setattr(collecting, "run_prompts", lambda *args: pytest.fail("ran again"))
    assert take(model, taken.path).missing == ()


def test_schedule_weighting_changes_the_moments(model, taken, tmp_path):
    scheduled = take(model, tmp_path / "s", recipe_with(buckets=1, weighting="schedule"))
    layer = layers_to_pack(model.components[0], recipe_with(buckets=1))[0]
    a, b = (h.read(model.components[0], layer) for h in (taken, scheduled))
    assert a.rows == b.rows
    assert not torch.allclose(a.second, b.second, rtol=1e-3)


def test_flux_is_observed_in_the_unit_of_its_calls(tmp_path):
    model = open_model(str(tiny_flux_pipeline(tmp_path / "flux")))
    hessians = take(model, tmp_path / "h", recipe_with(buckets=1, weighting="schedule", steps=2))
    assert hessians.missing == ()


def test_other_settings_in_the_same_directory_are_refused(model, taken):
    with pytest.raises(OutputError, match=r"another steps \(3 then, 4 now\).*set force"):
        take(model, taken.path, recipe_with(buckets=1, steps=4))


def test_a_directory_without_a_layer_takes_other_settings(model, tmp_path, monkeypatch):
    def refuse(*_):
        raise RecipeError("its steps cannot be weighed")

    with monkeypatch.context() as patched, pytest.raises(RecipeError):
        patched.setattr(collecting, "run_prompts", refuse)
        take(model, tmp_path / "h", recipe_with(buckets=1, weighting="schedule"))
    hessians = take(model, tmp_path / "h", recipe_with(buckets=1))
    assert (hessians.missing, load_hessians(tmp_path / "h").index.weighting) == ((), "uniform")


def test_a_directory_of_something_else_is_refused(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="not a directory of hessians"):
        take(model, tmp_path)
    result = CliRunner().invoke(
        command, [str(model.path), "-o", str(tmp_path), "--force", "-q", "--device", "cpu"]
    )
    assert isinstance(result.exception, OutputError)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_layer_that_does_not_fit_is_named(model, tmp_path):
    layers = layers_to_pack(model.components[0], recipe_with(buckets=1))
    with pytest.raises(RecipeError, match=r"K \d+: its second moment takes .* give more memory"):
        take(model, tmp_path / "h", memory=1000)
    assert not (tmp_path / "h").exists()
    groups = group_layers(layers, 3 * max(map(moment_bytes, layers)))
    assert [layer for group in groups for layer in group] == list(layers)
    assert all(sum(map(moment_bytes, g)) <= 3 * max(map(moment_bytes, layers)) for g in groups)


def test_moments_of_another_model_or_layer_are_refused(model, taken, tmp_path):
    component = model.components[0]
    layer = layers_to_pack(component, recipe_with(buckets=1))[0]
    with pytest.raises(ArtefactError, match="had other weights"):
        taken.read(component, layer, "0" * 64)
    other = open_model(str(tiny_transformer(tmp_path / "pixart"))).components[0]
    with pytest.raises(ArtefactError, match="no layer"):
        taken.read(other, layers_to_pack(other, recipe_with(buckets=1))[0])


def test_a_damaged_file_is_refused(model, taken, tmp_path):
    component = model.components[0]
    layer = layers_to_pack(component, recipe_with(buckets=1))[0]
    copy = load_hessians(taken.path)
    file = copy.file_of(component.name, layer.name)
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ArtefactError, match="checksum"):
            copy.read(component, layer)
        tensors = load_file(file)
        save_file({"second": tensors["second"]}, file)
        with pytest.raises(ArtefactError, match="not a quantkit_hessian file"):
            copy.read(component, layer)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ('{"format": "other"}', "not an index of hessians"),
        ('{"format": "quantkit.hessians", "format_version": 2}', "format_version 2, expected 1"),
        ('{"format": "quantkit.hessians", "format_version": 1}', "damaged"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path, text, words):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ArtefactError, match=words):
        load_hessians(tmp_path)


def test_the_command_says_what_it_would_do_and_does_it(model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    output = tmp_path / "h"
    base = [str(model.path), "--prompts", str(prompts), "--count", "1", "-q"]
    base += ["-o", str(output), "--device", "cpu", "--json", "-r", "fp8-two"]
    recipe = tmp_path / "fp8-two.yaml"
    recipe.write_text("name: two\ncalibration: {steps: 2, buckets: 1}\n")
    base[-1] = str(recipe)
    planned = json.loads(CliRunner().invoke(command, [*base, "-n"]).output)
    assert planned["written"] is None
    assert not output.exists()
    done = json.loads(CliRunner().invoke(command, base, catch_exceptions=False).output)
    assert done == planned | {"written": str(output), "unseen": {}}
    entry = done["components"]["unet"]
    assert entry["bytes"] == sum(
        moment_bytes(layer) for layer in layers_to_pack(model.components[0], recipe_with(buckets=1))
    )
    again = CliRunner().invoke(command, [*base, "--force"], catch_exceptions=False)
    assert again.exit_code == 0


def test_a_disk_that_is_full_before_is_told_before_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    monkeypatch.setattr("quantkit.calibration.moments.collect_hessians.sha256_of", pytest.fail)
    result = CliRunner().invoke(
        command, [str(model.path), "-o", str(tmp_path / "h"), "--count", "1", "--quiet"]
    )
    assert isinstance(result.exception, OutputError)
    assert re.search(r"h: 1 bytes free, expected [\d.]+ MB; free some", str(result.exception))
    assert not (tmp_path / "h").exists()


def test_a_disk_that_becomes_full_leaves_layers_to_go_on_from(model, taken, tmp_path, monkeypatch):
    write, done = Hessians.write, []

    def full(self, component, layer, moments):
        if len(done) == 3:
            raise OutputError(f"{self.file_of(component, layer)}: no space left on the device")
        write(self, component, layer, moments)
        done.append(layer)

    monkeypatch.setattr(Hessians, "write", full)
    with pytest.raises(OutputError, match=r"no space.*; \d+ layers are left: run the same command"):
        take(model, tmp_path / "h")
    monkeypatch.undo()
    found = take(model, tmp_path / "h")
    assert not found.missing
    assert found.index == taken.index


def test_force_keeps_the_old_moments_until_new_ones_begin(model, tmp_path):
    old = take(model, tmp_path / "h")
    files = {path: path.stat().st_mtime_ns for path in old.path.rglob("*.safetensors")}
    with pytest.raises(PromptError):
        collect_hessians(
            model,
            recipe_with(buckets=1),
            (),
            old.path,
            memory=GIB,
            device="cpu",
            progress=silent,
            force=True,
        )
    assert files == {path: path.stat().st_mtime_ns for path in old.path.rglob("*.safetensors")}
    check_directory(old.path, kind=KIND, force=True)
    (old.path / "notes").write_text("mine")
    with pytest.raises(OutputError, match="holds notes, which quantkit did not write"):
        collect_hessians(
            model, recipe_with(buckets=1), PROMPTS, old.path, memory=GIB, device="cpu",
            progress=silent, force=True,
        )  # fmt: skip
