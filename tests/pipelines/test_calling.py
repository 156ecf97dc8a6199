"""Calls that are tried before long work, and pictures for pipelines that need some."""

import diffusers
import numpy as np
import pytest
import torch

import quantkit
from quantkit.errors import ModelError
from quantkit.pipelines.calling import Call, draw_mask, draw_picture, fewest_steps, rehearse
from tests.support.pipelines import picture_pipeline

TWO = Call(("a cat", "a red dog"), (3, 4), 4, output="np")


def rehearsed(cls, **changed):
    pipe = picture_pipeline(cls, **changed)
    rehearse(pipe, TWO)
    return pipe


@pytest.mark.parametrize(
    ("cls", "channels"),
    [
        ("StableDiffusionInpaintPipeline", 9),
        ("StableDiffusionInpaintPipeline", 4),
        ("StableDiffusionImg2ImgPipeline", 4),
        ("StableDiffusionInstructPix2PixPipeline", 8),
    ],
)
def test_pipelines_that_need_a_picture_run_on_one(cls, channels):
    pipe = rehearsed(cls, in_channels=channels)
    given = TWO.arguments(pipe)
    assert len(given["image"]) == 2
    # From noise, so that every timestep is seen.
    assert given.get("strength", 1.0) == 1.0
    timesteps = []
    pipe.unet.register_forward_pre_hook(lambda _, args: timesteps.append(float(args[1])))
    pictures = pipe(**given).images
    assert pictures.shape[0] == 2
    assert np.isfinite(pictures).all()
    assert timesteps == pipe.scheduler.timesteps.tolist()


def test_prompts_alone_are_given_to_pipelines_that_take_them():
    pipe = rehearsed("StableDiffusionPipeline")
    assert set(TWO.arguments(pipe)) == {"prompt", "num_inference_steps", "generator", "output_type"}


def test_a_trial_ends_at_the_first_answer_and_leaves_no_hook():
    pipe = picture_pipeline("StableDiffusionPipeline")
    calls = []
    handle = pipe.unet.register_forward_pre_hook(lambda *_: calls.append(1))
    rehearse(pipe, TWO)
    assert len(calls) == 1
    handle.remove()
    assert not pipe.unet._forward_hooks


def test_long_prompts_that_the_encoder_cannot_read_are_found_before_the_run():
    """A tokenizer of another length gives more tokens than CLIP has places for."""
    pipe = picture_pipeline("StableDiffusionPipeline")
    pipe.tokenizer.model_max_length = 64
    prompts = ("a cat", "a dog", "a very long prompt of many words " * 4, "a bird")
    with pytest.raises(ModelError, match=r"cannot run 4 steps on a prompt alone \('a very long"):
        rehearse(pipe, Call(prompts, (0, 1, 2, 3), 4))


def test_schedulers_with_a_least_number_of_steps_get_it():
    pipe = picture_pipeline("StableDiffusionPipeline")
    pipe.scheduler = diffusers.PNDMScheduler(skip_prk_steps=False)
    few = fewest_steps(pipe, Call(("a cat",), (0,), 10), 2)
    assert few.steps == 4
    with pytest.raises(ModelError, match="cannot run 2 steps"):
        rehearse(pipe, Call(("a cat",), (0,), 2))
    pipe.scheduler = diffusers.DDIMScheduler()
    assert fewest_steps(pipe, Call(("a cat",), (0,), 10), 2).steps == 2
    assert fewest_steps(pipe, Call(("a cat",), (0,), 1), 2).steps == 1


class OfClasses(diffusers.DiffusionPipeline):
    def __call__(self, class_labels, num_inference_steps=2):
        raise AssertionError


class OfNothing(diffusers.DiffusionPipeline):
    def __call__(self, batch_size=1, num_inference_steps=2):
        raise AssertionError


@pytest.mark.parametrize(("kind", "needs"), [(OfClasses, "class_labels"), (OfNothing, "no prompt")])
def test_pipelines_that_nothing_here_runs_are_refused_by_what_they_take(kind, needs):
    with pytest.raises(ModelError, match=f"{kind.__name__} takes {needs}"):
        rehearse(kind(), TWO)


def test_pictures_are_the_same_every_time_and_masks_have_both_parts():
    picture = np.asarray(draw_picture(64))
    assert np.array_equal(picture, np.asarray(draw_picture(64)))
    assert len(np.unique(picture)) > 100
    mask = np.asarray(draw_mask(64))
    assert mask.mean() == pytest.approx(255 / 4)


def test_an_inpainting_model_is_calibrated(tmp_path):
    picture_pipeline("StableDiffusionInpaintPipeline", in_channels=9).to(
        torch.float16
    ).save_pretrained(tmp_path / "model")
    found = quantkit.calibrate(
        tmp_path / "model", recipe="int8", sampling=quantkit.Sampling(count=1, steps=4)
    )
    assert found.calibration.metadata.calls == {"unet": [1, 1, 1, 1]}
    assert not found.unseen
