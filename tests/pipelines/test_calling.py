"""Calls that are tried before long work, and pictures for pipelines that need some."""

from collections import Counter
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch

import quantkit
from quantkit.errors import ModelError
from quantkit.pipelines.calling import Call, fewest_steps, rehearse
from quantkit.pipelines.own_inputs import OwnInputs, draw_mask, draw_picture
from tests.support.picture_pipelines import (
    PICTURE_PIPELINES,
    small_flux_pictures,
    two_controlnets,
)
from tests.support.pipelines import picture_pipeline

TWO = Call(("a cat", "a red dog"), (3, 4), 4, output="np")


def rehearsed(pipe):
    """Return the call as the trial of it says that the pipeline is to be called."""
    return replace(TWO, inputs=rehearse(pipe, TWO))


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
    pipe = picture_pipeline(cls, in_channels=channels)
    given = rehearsed(pipe).arguments(pipe)
    assert given["image"].size == (16, 16)
    # From noise, so that every timestep is seen.
    assert given.get("strength", 1.0) == 1.0
    timesteps = []
    pipe.unet.register_forward_pre_hook(lambda _, args: timesteps.append(float(args[1])))
    pictures = pipe(**given).images
    assert pictures.shape[0] == 2
    assert np.isfinite(pictures).all()
    assert timesteps == pipe.scheduler.timesteps.tolist()


def test_prompts_alone_are_given_to_pipelines_that_take_them():
    pipe = picture_pipeline("StableDiffusionPipeline")
    assert rehearse(pipe, TWO) is None
    assert set(TWO.arguments(pipe)) == {"prompt", "num_inference_steps", "generator", "output_type"}


#: What each pipeline of the table is given: one picture, or a list of one for each prompt.
GIVEN = {
    "refiner": OwnInputs(16, listed=False),
    "controlnet": OwnInputs(16, listed=False),
    # As large as its latents.
    "upscaler": OwnInputs(8, listed=True),
    "depth": OwnInputs(16, listed=False),
    "gligen": OwnInputs(16, listed=False),
    "fill": OwnInputs(32, listed=False),
    "kontext": OwnInputs(32, listed=False),
}


@pytest.mark.parametrize("name", PICTURE_PIPELINES)
def test_pipelines_of_many_kinds_run_on_what_a_trial_found(name):
    with small_flux_pictures():
        pipe = PICTURE_PIPELINES[name]()
        pipe.set_progress_bar_config(disable=True)
        call = rehearsed(pipe)
        assert call.inputs == GIVEN[name]
        pictures = pipe(**call.arguments(pipe)).images
    assert len(pictures) == 2
    assert np.isfinite(pictures).all()


def test_a_picture_that_may_be_left_out_is_given():
    """FLUX Kontext also runs on a prompt alone, and edits pictures: their tokens are seen."""
    with small_flux_pictures():
        pipe = PICTURE_PIPELINES["kontext"]()
        pipe.set_progress_bar_config(disable=True)
        lengths = []
        pipe.transformer.x_embedder.register_forward_pre_hook(
            lambda _, args: lengths.append(args[0].shape[1])
        )
        call = rehearsed(pipe)
        pipe(**call.arguments(pipe))
    # 32 pixels are 16 latents, packed by twos: as many tokens of the picture as of the noise.
    assert set(lengths) == {2 * 8 * 8}


def test_phrases_and_boxes_reach_every_fuser_at_every_step():
    pipe = PICTURE_PIPELINES["gligen"]()
    pipe.set_progress_bar_config(disable=True)
    calls = Counter()
    for name, module in pipe.unet.named_modules():
        if name.endswith("fuser.linear"):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    call = rehearsed(pipe)
    calls.clear()
    pipe(**call.arguments(pipe))
    assert len(calls) == 4
    assert set(calls.values()) == {TWO.steps}


def test_a_list_that_suits_by_chance_is_no_way_to_call_a_pipeline():
    """Two ControlNets take a list of two pictures, and so do two prompts."""
    pipe = two_controlnets()
    with pytest.raises(ModelError, match=r"same length as the number of controlnets.*as fp8"):
        rehearse(pipe, TWO)


def test_pipelines_of_one_class_are_called_each_in_its_own_way():
    """What a trial finds is of its pipeline, not of its class."""
    small = picture_pipeline("StableDiffusionImg2ImgPipeline")
    large = picture_pipeline("StableDiffusionImg2ImgPipeline", sample_size=16)
    found = rehearse(small, TWO), rehearse(large, TWO)
    assert found == (OwnInputs(16, listed=False), OwnInputs(32, listed=False))
    # Nothing stays behind.
    assert "image" not in TWO.arguments(small)


class Either(diffusers.StableDiffusionPipeline):
    """Takes a picture, but only in a form that nobody here makes."""

    def __call__(self, prompt, num_inference_steps=2, image=None, **more):
        if image is not None:
            raise ValueError("image: expected latents")
        return super().__call__(prompt, num_inference_steps=num_inference_steps, **more)


def test_pictures_that_do_not_work_are_left_out_with_a_warning(caplog):
    pipe = Either(**picture_pipeline("StableDiffusionPipeline").components)
    pipe.set_progress_bar_config(disable=True)
    assert rehearse(pipe, TWO) is None
    (told,) = (r.getMessage() for r in caplog.records if r.name.startswith("quantkit"))
    assert "run on prompts alone" in told
    assert "image: expected latents" in told


def test_where_only_text_is_encoded_no_denoiser_answers():
    pipe = picture_pipeline("StableDiffusionImg2ImgPipeline")
    answers = []
    pipe.unet.register_forward_hook(lambda *_: answers.append(1))
    assert rehearse(pipe, TWO, denoises=False) == OwnInputs(16, listed=False)
    assert not answers
    assert not pipe.unet._forward_pre_hooks


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
    recipe = quantkit.load_recipe("int8", {"calibration.steps": 5})
    found = quantkit.calibrate(tmp_path / "model", recipe=recipe, count=1)
    assert found.calibration.metadata.calls == {"unet": [1, 1, 1, 1, 1]}
    assert not found.unseen
