"""Error over the steps and the noise floor, on tiny pipelines of every way to call back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from quantkit.eval.judging.noise_floor import (
    OTHER_DTYPE,
    Original,
    measure_floors,
    measure_gaps,
    other_batch,
    wide_products,
)
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.generation import GenerationSettings, choose_prompts, generate
from quantkit.eval.measuring.step_errors import (
    Divergence,
    LocalErrors,
    StepErrors,
    StepLatents,
    Trajectory,
    nmse,
    shadowed,
)

from quantkit.errors import PromptError
from quantkit.models.source import open_model
from quantkit.pipelines.running import load_pipeline

CPU = torch.device("cpu")
SETTINGS = GenerationSettings(("a ball", "a box", "a cat"), (7, 8, 9), steps=3, batch=2)


def loaded(path, dtype=None):
    pipe = load_pipeline(open_model(str(path)), CPU, dtype)
    if hasattr(pipe, "default_sample_size"):
        # FLUX draws 128x128 latents whatever its files say.
        pipe.default_sample_size = 8
    return pipe


# --- NMSE and its summary


def test_nmse_is_that_of_numpy_row_by_row():
    rng = np.random.default_rng(0)
    expected, answer = rng.normal(size=(2, 4, 3, 5, 5))
    by_hand = [np.sum((a - w) ** 2) / np.sum(w**2) for a, w in zip(answer, expected, strict=True)]
    assert nmse(torch.tensor(answer), torch.tensor(expected)) == pytest.approx(by_hand, rel=1e-12)


def test_nmse_sees_scale_and_names_what_is_undefined():
    one = torch.ones(1, 8, dtype=torch.float16)
    assert nmse(1.5 * one, one) == [0.25]
    assert nmse(0 * one, 0 * one) == [0.0]
    assert nmse(one, 0 * one) == [np.inf]
    assert nmse(one * torch.nan, one) == [np.inf]


def test_mean_and_quartiles_are_numpys():
    values = ((1.0, 2.0, 3.0, 10.0), (0.5, 0.5, 0.5, 0.5))
    errors = StepErrors((9.0, 1.0), values)
    assert errors.mean == (4.0, 0.5)
    assert errors.quantile(0.25) == tuple(np.percentile(values, 25, axis=1))
    assert errors.quantile(0.75) == tuple(np.percentile(values, 75, axis=1))


def latents(first, index, rows):
    return StepLatents(first, index, 900.0 - 100 * index, torch.tensor(rows).reshape(-1, 1, 1))


def test_divergence_does_not_mind_another_batch_split():
    trajectory, together, alone = Trajectory(2), None, None
    for index in range(2):
        trajectory.listen(latents(0, index, [1.0, 2.0]))
    together, alone = Divergence(trajectory), Divergence(trajectory)
    for index in range(2):
        together.listen(latents(0, index, [2.0, 2.0]))
    for first, value in ((0, [2.0]), (1, [2.0])):
        for index in range(2):
            alone.listen(latents(first, index, value))
    expected = StepErrors((900.0, 800.0), ((1.0, 0.0), (1.0, 0.0)))
    assert together.errors() == alone.errors() == expected


def test_trajectory_keeps_whole_batches_up_to_its_limit():
    # two prompts of 4 bytes and 2 steps are 16 bytes: the second batch does not fit
    trajectory = Trajectory(2, limit=20)
    for first in (0, 2):
        for index in range(2):
            trajectory.listen(latents(first, index, [1.0, 2.0]))
    assert sorted(trajectory.latents) == [0, 1]
    assert trajectory.nbytes == 16
    divergence = Divergence(trajectory)
    divergence.listen(latents(2, 0, [5.0, 5.0]))
    assert divergence.errors() is None


def test_local_errors_book_every_call_under_its_step():
    local = LocalErrors()
    one = torch.ones(2, 4)
    assert local.errors() is None
    for index in range(2):
        local.add(one * 1.5, one)
        local.add(one * 3, one)
        local.listen(StepLatents(0, index, 10.0 - index, one))
    assert local.errors() == StepErrors((10.0, 9.0), ((0.25, 0.25, 4.0, 4.0),) * 2)


# --- on pipelines


@pytest.fixture(scope="module")
def pixart_dir(transformer_dir, pipeline_dir, tmp_path_factory):
    """A PixArtAlphaPipeline: it knows the older callback only."""
    import diffusers

    from tests.support.pipelines import t5_encoder, t5_tokenizer

    path = tmp_path_factory.mktemp("pixart") / "pipeline"
    transformer = diffusers.PixArtTransformer2DModel.from_pretrained(transformer_dir)
    transformer = diffusers.PixArtTransformer2DModel.from_config(
        {**transformer.config, "caption_channels": 64, "sample_size": 32}
    )
    pipe = diffusers.PixArtAlphaPipeline(
        tokenizer=t5_tokenizer(), text_encoder=t5_encoder(),
        vae=diffusers.AutoencoderKL.from_pretrained(pipeline_dir / "vae"),
        transformer=transformer, scheduler=diffusers.DPMSolverMultistepScheduler(),
    )  # fmt: skip
    pipe.to(torch.float16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def flux_dir(tmp_path_factory):
    from tests.support.pipelines import tiny_flux_pipeline

    return tiny_flux_pipeline(tmp_path_factory.mktemp("flux") / "pipeline")


@pytest.fixture(autouse=True)
def _small_pixart(monkeypatch):
    """PixArt's pipelines round every size to one of a table, whose least is 256x256."""
    import diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha as module

    monkeypatch.setattr(module, "ASPECT_RATIO_256_BIN", {"1.0": [16.0, 16.0]})


@pytest.fixture(params=["pipeline_dir", "transformer_pipeline_dir", "flux_dir", "pixart_dir"])
def kind(request):
    return request.getfixturevalue(request.param)


def denoiser(pipe):
    return "unet" if "unet" in pipe.components else "transformer"


def nudged(pipe, factor):
    """Scale the last layer's weight and bias: every answer is ``factor`` times as large."""
    model = pipe.components[denoiser(pipe)]
    last = model.conv_out if hasattr(model, "conv_out") else model.proj_out
    with torch.no_grad():
        last.weight.mul_(factor)
        last.bias.mul_(factor)
    return pipe


def test_every_pipeline_tells_its_steps(kind):
    pipe, twin = loaded(kind), nudged(loaded(kind), 1.5)
    trajectory = Trajectory(SETTINGS.steps)
    made = generate(pipe, SETTINGS, label="original", listener=trajectory.listen)
    assert made.peak_bytes is None, "a CPU has no peak of its own"
    assert sorted(trajectory.latents) == [0, 1, 2]
    assert {len(rows) for rows in trajectory.latents.values()} == {3}
    divergence = Divergence(trajectory)
    generate(twin, SETTINGS, label="packed", listener=divergence.listen)
    found = divergence.errors()
    assert [len(step) for step in found.values] == [3, 3, 3]
    assert list(found.timesteps) == sorted(found.timesteps, reverse=True)
    assert all(error > 0 for step in found.values for error in step)


def test_local_error_is_that_of_the_denoiser_alone(kind):
    pipe, twin = loaded(kind), nudged(loaded(kind), 1.5)
    settings = replace(SETTINGS, guidance=4.0)
    with shadowed(pipe, twin, (denoiser(pipe),)) as local:
        generate(pipe, settings, label="original", listener=local.listen)
    found = local.errors()
    # Answers 1.5 times as large on the same latents: NMSE 0.25 at every step, whatever came before.
    assert all(error == pytest.approx(0.25, rel=1e-4) for step in found.values for error in step)
    # FLUX embeds its guidance; the others run every prompt twice.
    rows = 3 if "FluxPipeline" in type(pipe).__name__ else 6
    assert [len(step) for step in found.values] == [rows] * 3
    # nothing stays behind
    with shadowed(pipe, twin, (denoiser(pipe),)) as local:
        pass
    assert not pipe.components[denoiser(pipe)]._forward_hooks


# --- the noise floor


def original_of(path, settings=SETTINGS, dtype=torch.float32):
    model = open_model(str(path))
    pipe = load_pipeline(model, CPU, dtype)
    trajectory = Trajectory(settings.steps)
    made = generate(pipe, settings, label="original", listener=trajectory.listen)
    return pipe, Original(model, settings, CPU, dtype, made, trajectory)


def test_floor_runs_another_dtype_and_another_batch(pipeline_dir):
    pipe, original = original_of(pipeline_dir)
    dtype, batch = measure_floors(pipe, original, Backbones(), lambda *_: None)
    assert (dtype.name, dtype.title) == ("dtype", "BF16 instead of float32")
    assert (batch.name, batch.title) == ("batch", "batches of 1 instead of 2")
    assert dtype.comparison.prompts == SETTINGS.prompts
    # BF16 rounds to 2^-9 of a value, float32 sums in another order to 2^-24: squared
    assert 1e-9 < dtype.divergence.mean[-1] < 1e-2
    assert batch.divergence.mean[-1] < 1e-10
    itself = measure_gaps(dtype.comparison, (dtype, batch))
    assert itself[0].differences["ssim"].mean == 0.0
    assert itself[1].differences["ssim"].mean <= 0.0


def test_floor_that_overflows_is_a_note_and_not_the_end(pipeline_dir, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, broken)
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    # 2^17 is a value in BF16 and infinite in FP16, where the next norm takes Inf from Inf.
    tensors = {k: v.bfloat16() for k, v in tensors.items()}
    tensors["decoder.conv_in.bias"] += 2.0**17
    save_file(tensors, file, metadata={"format": "pt"})
    pipe, original = original_of(broken, replace(SETTINGS, steps=1), torch.bfloat16)
    dtype, batch = measure_floors(pipe, original, Backbones(), lambda *_: None)
    assert dtype.title == "FP16 instead of BF16"
    assert dtype.comparison is None
    assert dtype.note.startswith(
        "the original overflows: noise floor: FP16 instead of BF16, prompt"
    )
    assert "NaN or Inf" in dtype.note
    assert batch.comparison is not None
    assert measure_gaps(batch.comparison, (dtype,))[0].differences == {}


def test_one_prompt_has_no_other_batch(pipeline_dir):
    settings = GenerationSettings(("a ball",), (7,), steps=1, batch=4)
    pipe, original = original_of(pipeline_dir, settings)
    _, batch = measure_floors(pipe, original, Backbones(), lambda *_: None)
    assert (batch.comparison, batch.note) == (None, "one prompt cannot be split into batches")


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [(1, 4, None), (2, 1, 2), (2, 2, 1), (3, 8, 1), (12, 12, 6), (64, 4, 2), (5, 5, 2)],
)
def test_other_batch_differs_and_fits(count, batch, expected):
    assert other_batch(count, batch) == expected


def test_every_dtype_has_another_of_16_bit():
    for dtype, other in OTHER_DTYPE.items():
        assert dtype != other
        assert other.itemsize == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_products_round_once(dtype):
    x, w = torch.randn(5, 256).to(dtype), torch.randn(7, 256).to(dtype)
    images, kernel = torch.randn(1, 8, 6, 6).to(dtype), torch.randn(4, 8, 3, 3).to(dtype)
    with wide_products(CPU):
        linear = torch.nn.functional.linear(x, w)
        product = x @ w.T
        conv = torch.nn.functional.conv2d(images, kernel)
        # As diffusers' dispatch does for FLUX: every tensor by its name.
        named = torch.nn.functional.linear(input=x, weight=w)
        untouched = torch.nn.functional.linear(x.double(), w.double())
    exact = x.double() @ w.double().T
    # one rounding of the exact sum, give or take the float32 sum's own error at a tie
    assert torch.equal(linear, product)
    assert torch.equal(linear, named)
    assert (linear.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    assert (linear == exact.to(dtype)).float().mean() > 0.9
    assert (conv.dtype, untouched.dtype) == (dtype, torch.float64)
    assert torch.equal(conv, torch.nn.functional.conv2d(images.float(), kernel.float()).to(dtype))


# --- how many prompts


def test_a_gpu_takes_64_prompts_of_the_bundled_set_and_a_cpu_16(tmp_path):
    cuda = torch.device("cuda")
    many = choose_prompts(None, None, device=cuda, last=True)
    few = choose_prompts(None, None, device=CPU, last=True)
    assert (len(many), len(few)) == (64, 16)
    assert many[-16:] == few
    # calibration reads from the other end
    assert not set(many) & set(choose_prompts(None, 64, device=CPU, last=False))
    file = tmp_path / "p.txt"
    file.write_text("a\nb\nc\n")
    assert choose_prompts(file, None, device=cuda, last=True) == ("a", "b", "c")
    assert choose_prompts(file, 2, device=CPU, last=False) == ("a", "b")
    with pytest.raises(PromptError, match="3 prompts, expected 4; lower the count"):
        choose_prompts(file, 4, device=CPU, last=True)
