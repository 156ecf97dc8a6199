"""Calibrating pipelines that call their denoisers as no other does: videos, two experts."""

import functools
from typing import Any

import diffusers
import pytest
import torch

import quantkit
from quantkit.errors import ModelError
from quantkit.models.timestep import split_schedule, timestep_argument
from quantkit.pipelines.running import quiet_libraries
from quantkit.recipe.load import load_recipe
from tests.support.pipelines import tiny_wan_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    path = tiny_wan_pipeline(tmp_path_factory.mktemp("wan") / "pipeline")
    whole = diffusers.WanPipeline.__call__

    @functools.wraps(whole)
    def small(self, **kwargs):
        # 81 frames of 480 x 832 are the default.
        return whole(self, height=16, width=16, num_frames=5, **kwargs)

    with pytest.MonkeyPatch.context() as patch, quiet_libraries():
        patch.setattr(diffusers.WanPipeline, "__call__", small)
        yield path


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_both_experts_of_a_video_pipeline_are_packed(wan, tmp_path, name):
    recipe = load_recipe(name, {"calibration.steps": 4, "calibration.batch": 1})
    settings: dict[str, Any] = {"prompts": ["a cat", "a dog"], "recipe": recipe, "device": "cpu"}
    calibration = tmp_path / "calibration.safetensors"
    quantkit.calibrate(wan, output=calibration, **settings)
    hessians = None
    if load_recipe(name).needs_hessians:
        hessians = tmp_path / "hessians"
        quantkit.calibrate_hessians(wan, output=hessians, **settings)
    quantkit.pack(
        wan, output=tmp_path / "packed", recipe=name, calibration=calibration, hessians=hessians
    )
    assert len(quantkit.verify(tmp_path / "packed").components) == 2
    pipe = quantkit.load_pipeline(tmp_path / "packed")
    call = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "latent"}
    before = diffusers.WanPipeline.from_pretrained(wan)
    found, wanted = (
        p(**call, generator=torch.Generator().manual_seed(0)).frames.float() for p in (pipe, before)
    )
    error = float((found - wanted).square().sum() / wanted.square().sum())
    assert 0 < error < 0.1


@pytest.mark.parametrize("name", ["timestep", "timesteps", "timestep_ratio", "t"])
def test_the_timestep_is_found_by_all_its_names(name):
    scope: dict = {}
    exec(f"def forward(sample, {name}=None): raise AssertionError", scope)
    forward = scope["forward"]
    assert timestep_argument(forward, (1, 5), {}) == 5
    assert timestep_argument(forward, (1,), {name: 5}) == 5


def test_a_model_that_is_not_told_the_timestep_has_one_bucket():
    def forward(input_ids, pooled):
        raise AssertionError

    assert timestep_argument(forward, (1,), {"pooled": 2}) == 0


def test_calls_that_count_the_other_way_have_one_bucket():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    assert split_schedule(scheduler, 0.0, 1) == ()
    with pytest.raises(ModelError, match=r"set calibration\.buckets to 1"):
        split_schedule(scheduler, 0.0, 2)
