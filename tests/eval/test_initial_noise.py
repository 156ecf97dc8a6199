"""The noise of pipelines that differ in nothing but their dtype."""

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler
from quantkit.eval.measuring.initial_noise import one_noise


class Pipe:
    """What diffusers' pipelines do with their generator."""

    def __init__(self) -> None:
        self.scheduler = EulerAncestralDiscreteScheduler()
        self.scheduler.set_timesteps(4)

    def prepare_latents(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(
            (1, 4, 8, 8), generator=torch.Generator().manual_seed(7), device="cpu", dtype=dtype
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_noise_is_that_of_float32_rounded(dtype: torch.dtype) -> None:
    pipe = Pipe()
    expected = pipe.prepare_latents(torch.float32).to(dtype)
    with one_noise(pipe):
        found = pipe.prepare_latents(dtype)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_ancestral_steps_draw_the_same_noise() -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        pipe = Pipe()
        sample = torch.zeros(1, 4, 8, 8, dtype=dtype)
        with one_noise(pipe):
            step = pipe.scheduler.step(
                torch.zeros_like(sample),
                pipe.scheduler.timesteps[0],
                sample,
                generator=torch.Generator().manual_seed(3),
            )
        ends.append(step.prev_sample.float())
    assert ends[0].abs().max() > 0.5
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-2, atol=2e-2)


def test_the_pipeline_is_as_before_afterwards() -> None:
    pipe = Pipe()
    outside = pipe.prepare_latents(torch.bfloat16)
    with pytest.raises(RuntimeError, match="stop"), one_noise(pipe):
        raise RuntimeError("stop")
    assert "prepare_latents" not in vars(pipe)
    assert "step" not in vars(pipe.scheduler)
    assert torch.equal(pipe.prepare_latents(torch.bfloat16), outside)


def test_pipelines_without_these_methods_are_left_alone() -> None:
    with one_noise(object()):
        pass
