"""Commands on pipelines that a prompt alone does not run: quantkit gives what they need."""

import pytest
import torch
from quantkit.eval.demo import demo_run

import quantkit
from quantkit.errors import ModelError
from quantkit.sensitivity import analyse
from quantkit.sensitivity.sensitivity_file import load_sensitivity
from quantkit.workflow import run as running
from quantkit.workflow.demo import make_demo
from tests.support.picture_pipelines import (
    PICTURE_PIPELINES,
    save,
    small_flux_pictures,
    two_controlnets,
)
from tests.support.sampling import one_of_each

PROMPTS = ("a cat", "a red dog", "a blue house")
#: Static scales, for which calibration has to see every layer.
RECIPE = """
name: short
activation: {mode: static}
calibration: {prompts: 2, steps: 2, buckets: 1, batch: 2}
"""
PICTURES = quantkit.EvaluationSettings(
    prompts=PROMPTS, count=1, steps=2, without=("lpips", "clip"), noise_floor=False
)
#: Those with a second network, and those of Flux; UNets alone are the rest.
KINDS = {"controlnet": "two", "fill": "flux", "kontext": "flux"}
#: More than any of the tiny schedulers was trained on.
TOO_MANY = 5000


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def model(request, tmp_path):
    with small_flux_pictures():
        yield save(request.param, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("model", one_of_each(PICTURE_PIPELINES, KINDS.get), indirect=True)
def test_a_run_calibrates_packs_and_compares(model, recipe, tmp_path):
    report = quantkit.run(model, recipe=recipe, output=tmp_path / "run", settings=PICTURES)
    assert report.comparison.scores["ssim"].values[0] > 0.5
    assert report.packing.packed > 0


@pytest.mark.parametrize("model", ["gligen", "kontext"], indirect=True)
def test_calibration_reaches_every_layer(model, recipe):
    """The fusers of GLIGEN among them, which a prompt alone does not call."""
    found = quantkit.calibrate(model, recipe=recipe, prompts=PROMPTS)
    (layers,) = found.calibration.layers.values()
    assert all(bool((statistics.count > 0).all()) for statistics in layers.values())
    assert not found.unseen


@pytest.mark.slow
@pytest.mark.parametrize("model", ["refiner", "fill"], indirect=True)
def test_sensitivity_and_recovery_give_pictures_too(model, recipe, tmp_path):
    calibration = tmp_path / "c.safetensors"
    quantkit.calibrate(model, recipe=recipe, output=calibration, prompts=PROMPTS)
    found = quantkit.measure_sensitivity(
        model,
        recipe=recipe,
        calibration=calibration,
        measure=1,
        prompts=PROMPTS,
    )
    assert any(layer.measured for layer in found.sensitivity.layers)
    masks = tmp_path / "m.safetensors"
    quantkit.sparsify(model, recipe="fp8-sparse", calibration=calibration, output=masks)
    training = quantkit.Training(steps=1, batch=2, sampling_batch=2, trajectories=2)
    recovered = quantkit.recover(
        model, output=tmp_path / "r", masks=masks, prompts=PROMPTS, training=training
    )
    assert recovered.trajectories == 2


def test_several_controlnets_are_packed_and_verified(tmp_path):
    """They are refused a calibration; their index names a class that no folder of theirs has."""
    two_controlnets().to(torch.float16).save_pretrained(tmp_path / "model")
    quantkit.pack(tmp_path / "model", recipe="fp8", output=tmp_path / "packed")
    assert (tmp_path / "packed" / "controlnet_1").is_dir()
    quantkit.verify(tmp_path / "packed")


def never(*_, **__):
    pytest.fail("the long work began")


def test_a_run_whose_pictures_cannot_be_made_ends_before_it_calibrates(
    pipeline_dir, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "build", never)
    settings = quantkit.EvaluationSettings(
        prompts=PROMPTS, count=1, steps=TOO_MANY, without=("lpips", "clip")
    )
    with pytest.raises(ModelError, match=f"cannot run {TOO_MANY} steps"):
        quantkit.run(pipeline_dir, recipe=recipe, output=tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_a_sensitivity_whose_pipeline_does_not_run_ends_before_it_measures(
    pipeline_dir, recipe, tmp_path, monkeypatch
):
    calibration = tmp_path / "c.safetensors"
    quantkit.calibrate(pipeline_dir, recipe=recipe, output=calibration, prompts=PROMPTS)
    monkeypatch.setattr(analyse, "local_errors", never)
    with pytest.raises(ModelError, match=f"cannot run {TOO_MANY} steps"):
        quantkit.measure_sensitivity(
            pipeline_dir,
            calibration=calibration,
            prompts=PROMPTS,
            recipe=quantkit.load_recipe("fp8", {"calibration.steps": TOO_MANY}),
        )


def test_a_sensitivity_whose_pipeline_fails_leaves_the_errors_of_layers(
    pipeline_dir, recipe, tmp_path, monkeypatch
):
    calibration, output = tmp_path / "c.safetensors", tmp_path / "s.json"
    quantkit.calibrate(pipeline_dir, recipe=recipe, output=calibration, prompts=PROMPTS)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(analyse.TriedPipeline, "latents", fail)
    with pytest.raises(MemoryError):
        quantkit.measure_sensitivity(
            pipeline_dir, recipe=recipe, calibration=calibration, prompts=PROMPTS, output=output
        )
    kept = load_sensitivity(output)
    assert kept.layers
    assert not any(layer.measured for layer in kept.layers)


def test_a_demo_whose_pictures_cannot_be_made_runs_no_command(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_run, "load_backbones", lambda *_, **__: None)
    with pytest.raises(ModelError, match=f"cannot run {TOO_MANY} steps"):
        make_demo(
            tmp_path / "demo", command=never, steps=TOO_MANY, tell=lambda _: None, device="cpu"
        )
