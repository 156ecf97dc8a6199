"""Calibrating pipelines of every family, against the inputs that their layers see."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.calibration.observing import collect
from quantkit.calibration.observing.collect import calibrate, observed_layers
from quantkit.calibration.statistics.layer_statistics import load_calibration, save_calibration
from quantkit.errors import ArtefactError, ModelError, NonFiniteError, OutputError, PromptError
from quantkit.models.source import open_model
from quantkit.models.timestep import bucket_of
from quantkit.pipelines.batches import split_batches
from quantkit.pipelines.running import (
    choose_device,
    choose_dtype,
    load_pipeline,
    quiet_libraries,
    run_batch,
)
from quantkit.progress import silent
from quantkit.recipe.load import change_recipe
from tests.support.observed import FIELDS, PROMPTS, RECIPE, TwoAtOnce, statistics_of
from tests.support.pipelines import small_pictures, tiny_flux_pipeline


@pytest.fixture(scope="module")
def flux_dir(tmp_path_factory):
    with small_pictures("FluxPipeline"):
        yield tiny_flux_pipeline(tmp_path_factory.mktemp("tiny") / "flux")


@pytest.fixture(scope="module", params=["sd", "sd3", "flux"])
def source(request, pipeline_dir, transformer_pipeline_dir):
    paths = {"sd": pipeline_dir, "sd3": transformer_pipeline_dir}
    path = paths.get(request.param) or request.getfixturevalue("flux_dir")
    return open_model(str(path))


@pytest.fixture(scope="module")
def calibration(source):
    return calibrate(source, RECIPE, PROMPTS, device="cpu", progress=silent)


def test_pipeline_is_observed_as_its_layers_see_it(source, calibration):
    (component,) = source.components
    raw = {layer.name: ([], []) for layer in observed_layers(component, RECIPE)}
    bucket = [0]
    with quiet_libraries():
        pipe = load_pipeline(source, torch.device("cpu"))
        denoiser = getattr(pipe, component.name)

        def begin(module, args, kwargs):
            t = kwargs["timestep"] if "timestep" in kwargs else args[1]
            bucket[0] = bucket_of(float(torch.as_tensor(t).reshape(-1)[0]), calibration.edges)

        def keep(name):
            def listen(module, args):
                axis = 1 if args[0].ndim == 4 else -1
                x = args[0].movedim(axis, -1)
                raw[name][bucket[0]].append(x.reshape(-1, x.shape[-1]).clone())

            return listen

        denoiser.register_forward_pre_hook(begin, with_kwargs=True)
        for name in raw:
            denoiser.get_submodule(name).register_forward_pre_hook(keep(name))
        for batch in split_batches(PROMPTS, RECIPE.calibration):
            run_batch(pipe, batch, RECIPE.calibration)
    found = calibration.of(component)
    assert set(found) == set(raw)
    for name, buckets in raw.items():
        wanted = statistics_of(*(torch.cat(b) for b in buckets))
        assert torch.equal(found[name].amax, wanted.amax), name
        assert torch.equal(found[name].histogram, wanted.histogram), name
        assert torch.equal(found[name].count, wanted.count), name
        torch.testing.assert_close(found[name].second_moment, wanted.second_moment)
        torch.testing.assert_close(found[name].mean, wanted.mean, rtol=1e-4, atol=1e-5)
        if wanted.samples.shape == found[name].samples.shape:
            counts = found[name].sample_count.tolist()
            for rows, stored, count in zip(buckets, found[name].samples, counts, strict=True):
                seen = {*map(tuple, torch.cat(rows).bfloat16().tolist())}
                assert count == min(32, len(torch.cat(rows)))
                assert {*map(tuple, stored[:count].tolist())} <= seen, name


def test_provenance_says_how_it_was_taken(source, calibration):
    about = calibration.metadata
    (component,) = source.components
    assert (about.recipe, about.prompts, about.steps, about.seed) == ("fp8", 3, 4, 7)
    # 4 steps of 2 batches, split over 2 buckets
    assert about.calls == {component.name: [4, 4]}
    assert set(about.versions) == {"quantkit", "torch", "diffusers"}
    layers = observed_layers(component, RECIPE)
    assert set(calibration.digests_of(component)) == {layer.name for layer in layers}


def test_edges_are_in_the_unit_of_the_call(source, calibration):
    (edge,) = calibration.edges
    low, high = (0, 1) if source.components[0].family.name == "flux" else (200, 900)
    assert low < edge < high


def test_batches_that_run_at_once_give_the_same_statistics(source, monkeypatch):
    """Odd ones at the end too: three batches, of two, two and one prompts."""
    recipe = change_recipe(RECIPE, {"calibration.prompts": 5})
    prompts = (*PROMPTS, "a house", "seven green boats on a lake")
    wanted = calibrate(source, recipe, prompts, device="cpu", progress=silent)
    monkeypatch.setattr(collect, "GrowingBatches", TwoAtOnce)
    calls = []
    found = calibrate(
        source, recipe, prompts, device="cpu", progress=lambda *now: calls.append(now)
    )
    (component,) = source.components
    assert found.metadata.calls == wanted.metadata.calls == {component.name: [6, 6]}
    assert max(done for what, done, _ in calls if what == "denoising") == 12
    for name, one in found.of(component).items():
        other = wanted.of(component)[name]
        assert torch.equal(one.updates, other.updates), name
        assert torch.equal(one.count, other.count), name
        for field in ("amax", "channel_amax", "second_moment", "mean"):
            found_now, wanted_now = getattr(one, field), getattr(other, field)
            torch.testing.assert_close(found_now, wanted_now, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.moving_amax, other.moving_amax, rtol=1e-5, atol=0)
        torch.testing.assert_close(one.sample_priority, other.sample_priority)


def test_calibration_survives_its_file(source, calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    save_calibration(calibration, path, force=False)
    loaded = load_calibration(path)
    assert (loaded.edges, loaded.metadata) == (calibration.edges, calibration.metadata)
    (component,) = source.components
    for name, statistics in calibration.of(component).items():
        again = loaded.of(component)[name]
        for field in FIELDS:
            assert torch.equal(getattr(again, field), getattr(statistics, field))
    with pytest.raises(OutputError, match="exists already"):
        save_calibration(calibration, path, force=False)


def test_batches_change_nothing_but_rounding(sd, sd_calibration):
    one = calibrate(
        sd, change_recipe(RECIPE, {"calibration.batch": 1}), PROMPTS, device="cpu", progress=silent
    )
    for name, statistics in sd_calibration.layers["unet"].items():
        other = one.layers["unet"][name]
        assert torch.equal(other.count, statistics.count)
        torch.testing.assert_close(other.amax, statistics.amax, rtol=1e-3, atol=1e-5)
        # The same rows of the same images.
        assert torch.equal(other.sample_priority, statistics.sample_priority)
        torch.testing.assert_close(other.samples, statistics.samples, rtol=0.02, atol=0.02)


def test_guidance_and_prompts_reach_the_pipeline(sd, sd_calibration):
    unguided = calibrate(
        sd,
        change_recipe(RECIPE, {"calibration.guidance": 1.0}),
        PROMPTS,
        device="cpu",
        progress=silent,
    )
    name = "mid_block.attentions.0.proj_in"
    counts = [c.layers["unet"][name].count.sum() for c in (sd_calibration, unguided)]
    # Guidance runs every prompt twice.
    assert counts[0] == 2 * counts[1]


def test_only_the_first_prompts_are_used(sd, sd_calibration):
    again = calibrate(sd, RECIPE, (*PROMPTS, "more"), device="cpu", progress=silent)
    name = "mid_block.attentions.0.proj_in"
    found, wanted = (c.layers["unet"][name] for c in (again, sd_calibration))
    assert torch.equal(found.histogram, wanted.histogram)


def test_progress_ends_at_its_total(sd):
    seen = {}
    calibrate(
        sd,
        change_recipe(RECIPE, {"calibration.prompts": 1}),
        PROMPTS,
        device="cpu",
        progress=lambda step, done, total: seen.__setitem__(step, (done, total)),
    )
    assert seen["denoising"] == (4, 4)
    assert seen["hashing weights"][0] == seen["hashing weights"][1] > 0


def test_statistics_of_a_pipeline_serve_its_denoiser_alone(sd, sd_calibration):
    alone = open_model(str(sd.components[0].path)).components[0]
    assert alone.name == ""
    assert sd_calibration.of(alone) is sd_calibration.layers["unet"]


def test_component_that_was_not_calibrated_is_named(sd_calibration, transformer_pipeline_dir):
    (component,) = open_model(str(transformer_pipeline_dir)).components
    with pytest.raises(ArtefactError, match="no component 'transformer', found 'unet'"):
        sd_calibration.of(component)


def test_nan_weight_is_found_where_it_is_read(pipeline_dir, tmp_path):
    path = Path(shutil.copytree(pipeline_dir, tmp_path / "p"))
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["down_blocks.0.resnets.0.conv1.bias"][5] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    pattern = r"unet\.down_blocks\.0\.resnets\.0\.conv2: NaN or Inf in its input at step 1 "
    with pytest.raises(NonFiniteError, match=pattern):
        calibrate(open_model(str(path)), RECIPE, PROMPTS, device="cpu", progress=silent)


def test_component_alone_cannot_be_calibrated(transformer_dir):
    model = open_model(str(transformer_dir))
    with pytest.raises(ModelError, match="runs the whole pipeline; pass the pipeline's directory"):
        calibrate(model, RECIPE, PROMPTS, device="cpu", progress=silent)


def test_pipeline_that_diffusers_cannot_load_is_one_line(pipeline_dir, tmp_path):
    path = Path(shutil.copytree(pipeline_dir, tmp_path / "p"))
    (path / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(ModelError, match="diffusers cannot load it") as caught:
        calibrate(open_model(str(path)), RECIPE, PROMPTS, device="cpu", progress=silent)
    assert "\n" not in str(caught.value)


def test_no_prompts_are_refused(sd):
    with pytest.raises(PromptError, match="no prompts"):
        calibrate(sd, RECIPE, (), device="cpu", progress=silent)


def test_device_and_dtype(sd):
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_dtype(sd, torch.device("cpu")) is torch.float32
    assert choose_dtype(sd, torch.device("cuda")) is torch.float16
    with pytest.raises(ModelError, match="device 'tpu9': unknown"):
        choose_device("tpu9")
    with pytest.raises(ModelError, match="torch sees"):
        choose_device("cuda:99")


def test_libraries_are_as_loud_as_before():
    from diffusers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet_libraries():
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
