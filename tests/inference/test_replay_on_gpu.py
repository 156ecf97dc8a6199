"""Replaying on a GPU: what a graph gives is what the calls give."""

import shutil

import pytest
import torch

import quantkit
from quantkit.device import log
from quantkit.inference.layers.prompts import keep_prompts
from quantkit.numerics.formats import INT8
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.scheme import Activation, Scheme
from tests.support.comparisons import is_near
from tests.support.denoisers import INPUTS, tiny_denoiser
from tests.support.loading import draw, packable
from tests.support.packed import pack_component

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that records graphs"),
]


def _answers(name, model, count=3):
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        given = _moved(INPUTS[name]())
        with torch.no_grad():
            found.append(model(**given).sample)
    return found


def _moved(value):
    if isinstance(value, dict):
        return {key: _moved(v) for key, v in value.items()}
    value = value.cuda()
    return value.half() if value.is_floating_point() and value.ndim > 1 else value


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux"])
def test_replayed_steps_answer_as_called_ones(name):
    model = tiny_denoiser(name).eval().half().cuda()
    wanted = _answers(name, model)
    found = quantkit.replay(model)
    answers = _answers(name, model)
    assert all(map(is_near, answers, wanted))
    (only,) = found.denoisers.values()
    assert (only.recorded, only.replayed, dict(only.eager)) == (1, 2, {})


@pytest.fixture(scope="module")
def int8_dir(pipeline_dir, tmp_path_factory):
    """A pipeline in INT8.

    Random weights of few channels amplify the flip of one FP8 code to a tenth of the answer, in
    float32 too.
    """
    path = tmp_path_factory.mktemp("int8") / "packed"
    shutil.copytree(pipeline_dir, path)
    scheme = Scheme(INT8, PerChannel(), None, Activation.TOKEN)
    pack_component(path / "unet", dict.fromkeys(packable(path / "unet"), scheme))
    return path


def _load(folder, **options):
    return quantkit.load_pipeline(folder, device="cuda", torch_dtype=torch.float16, **options)


def _drawn(pipe, prompt, steps=3):
    generator = torch.Generator().manual_seed(0)
    return pipe(
        prompt, num_inference_steps=steps, output_type="pt", generator=generator
    ).images.clone()


def _distance(a, b):
    return float((a - b).square().mean())


def _products(counted):
    return sum(n for (op, _, _), n in counted.calls.items() if op.startswith("gemm"))


def test_a_packed_pipeline_draws_the_same_and_names_its_kernels(int8_dir):
    pipe = _load(int8_dir, replay=False)
    keep_prompts(pipe, enabled=False)
    draw(pipe)  # the device's own test is counted, too
    with log.record() as called:
        wanted = draw(pipe)
    pipe = _load(int8_dir)
    keep_prompts(pipe, enabled=False)
    draw(pipe)
    with log.record() as replayed:
        found = torch.as_tensor(draw(pipe)).float()
    assert _distance(found, torch.as_tensor(wanted).float()) < 0.1 * found.var()
    assert _products(called) == _products(replayed) > 0
    assert any(op == "rows" for op, _, _ in replayed.calls)
    assert vars(pipe.unet)["forward"].replayed.eager == {}


def test_replayed_steps_read_the_keys_of_their_prompt(int8_dir):
    pipe = _load(int8_dir, replay=False)
    keep_prompts(pipe, enabled=False)
    prompts = ("a red square", "a blue one", "a red square")
    expected = [_drawn(pipe, prompt) for prompt in prompts]
    pipe = _load(int8_dir)
    red, blue, again = (_drawn(pipe, prompt) for prompt in prompts)
    torch.testing.assert_close(again, red, rtol=0, atol=0)
    assert _distance(red, expected[0]) < _distance(red, expected[1])
    assert _distance(blue, expected[1]) < _distance(blue, expected[0])
    with log.record() as computed:
        _drawn(pipe, "a green one", steps=1)
    with log.record() as kept:
        _drawn(pipe, "a green one", steps=3)
    keep_prompts(pipe, enabled=False)
    _drawn(pipe, "a green one", steps=1)
    with log.record() as anew:
        _drawn(pipe, "a green one", steps=3)
    # Of three steps the first alone has the products of the prompt.
    assert _products(anew) == 3 * _products(computed)
    assert _products(kept) < _products(anew)
    assert vars(pipe.unet)["forward"].replayed.eager == {}


def test_a_model_that_moved_is_not_launched(packed_dir):
    pipe = _load(packed_dir)
    wanted = _drawn(pipe, "a red square")
    pipe.to("cpu")
    torch.cuda.empty_cache()
    pipe.to("cuda")
    assert is_near(_drawn(pipe, "a red square"), wanted)
    assert vars(pipe.unet)["forward"].replayed.recorded == 2


def test_a_step_of_a_model_that_changed_is_thrown_away():
    from diffusers.models.attention_processor import AttnProcessor

    model = tiny_denoiser("sdxl").eval().half().cuda()
    quantkit.replay(model)
    _answers("sdxl", model)
    model.set_attn_processor(AttnProcessor())
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    answers = _answers("sdxl", model)
    quantkit.replay(model, enabled=False)
    assert all(map(is_near, answers, _answers("sdxl", model)))


def test_memory_is_given_back(packed_dir):
    pipe = _load(packed_dir, replay=False)
    kept = []
    for _ in range(6):
        quantkit.replay(pipe)
        draw(pipe)
        quantkit.replay(pipe, enabled=False)
        torch.cuda.empty_cache()
        kept.append(torch.cuda.memory_reserved())
    # What a step keeps is 2 MiB and more, each time.
    assert kept[-1] < kept[0] + 2**23
