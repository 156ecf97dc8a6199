"""Replaying on a GPU: what a graph gives is what the calls give."""

import pytest
import torch

import quantkit
from quantkit.device import log
from tests.support.denoisers import INPUTS, tiny_denoiser
from tests.support.loading import draw

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
    assert all(map(torch.equal, answers, wanted))
    (only,) = found.denoisers.values()
    assert (only.recorded, only.replayed, dict(only.eager)) == (1, 2, {})


def test_a_packed_pipeline_draws_the_same_and_names_its_kernels(packed_dir):
    pipe = quantkit.load_pipeline(packed_dir, device="cuda", torch_dtype=torch.float16)
    draw(pipe)  # the device's own test is counted, too
    with log.record() as called:
        wanted = draw(pipe)
    pipe = quantkit.load_pipeline(packed_dir, device="cuda", torch_dtype=torch.float16, replay=True)
    draw(pipe)
    with log.record() as replayed:
        assert torch.equal(torch.as_tensor(draw(pipe)), torch.as_tensor(wanted))
    assert called.calls == replayed.calls
    assert vars(pipe.unet)["forward"].replayed.eager == {}


def test_memory_is_given_back(packed_dir):
    pipe = quantkit.load_pipeline(packed_dir, device="cuda", torch_dtype=torch.float16)
    kept = []
    for _ in range(6):
        quantkit.replay(pipe)
        draw(pipe)
        quantkit.replay(pipe, enabled=False)
        torch.cuda.empty_cache()
        kept.append(torch.cuda.memory_reserved())
    # What a step keeps is 2 MiB and more, each time.
    assert kept[-1] < kept[0] + 2**23
