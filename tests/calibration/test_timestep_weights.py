"""The weights of steps in second moments: a scheduler's answer to an error of the model."""

import math

import diffusers
import pytest
import torch
from torch import nn
from torch.nn import functional

from quantkit.calibration.moments.moment_sums import MomentSum
from quantkit.calibration.moments.timestep_weights import CallWeights, responses, step_weights
from quantkit.errors import RecipeError
from quantkit.numerics.packed_2to4 import to_rows
from tests.support.moments import add_input


def ready(scheduler, steps=10):
    scheduler.set_timesteps(steps)
    return scheduler


def ddim(**config):
    return diffusers.DDIMScheduler(
        beta_schedule="scaled_linear", clip_sample=False, timestep_spacing="trailing", **config
    )


def angles(scheduler):
    """Return the angle of each step's noise level, and where each step ends."""
    steps = [int(t) for t in scheduler.timesteps]
    last = scheduler.final_alpha_cumprod
    alphas = [float(scheduler.alphas_cumprod[t]) for t in steps]
    ends = [*alphas[1:], float(last)]
    return [(math.acos(a**0.5), math.acos(b**0.5)) for a, b in zip(alphas, ends, strict=True)]


def test_responses_of_ddim_are_the_closed_form_for_v():
    scheduler = ready(ddim(prediction_type="v_prediction", rescale_betas_zero_snr=True), 20)
    # x_next = cos(a - b) x - sin(a - b) v: a rotation by the step's angle.
    turns = [a - b for a, b in angles(scheduler)]
    wanted = [
        -math.sin(turn) * math.prod(math.cos(later) for later in turns[i + 1 :])
        for i, turn in enumerate(turns)
    ]
    torch.testing.assert_close(
        responses(scheduler), torch.tensor(wanted, dtype=torch.float64), rtol=2e-3, atol=1e-4
    )


def test_responses_of_ddim_are_the_closed_form_for_epsilon():
    scheduler = ready(ddim(prediction_type="epsilon"), 20)
    grows = [math.cos(b) / math.cos(a) for a, b in angles(scheduler)]
    adds = [math.sin(b) - math.cos(b) * math.tan(a) for a, b in angles(scheduler)]
    wanted = [add * math.prod(grows[i + 1 :]) for i, add in enumerate(adds)]
    torch.testing.assert_close(
        responses(scheduler), torch.tensor(wanted, dtype=torch.float64), rtol=2e-3, atol=1e-4
    )


def test_responses_of_euler_flow_are_the_steps_of_sigma():
    scheduler = ready(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    wanted = scheduler.sigmas.diff().double()
    torch.testing.assert_close(responses(scheduler), wanted, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.DPMSolverMultistepScheduler(),
        diffusers.UniPCMultistepScheduler(),
        diffusers.PNDMScheduler(skip_prk_steps=True),
        diffusers.HeunDiscreteScheduler(),
        diffusers.EulerAncestralDiscreteScheduler(),
        diffusers.DDPMScheduler(clip_sample=False),
        diffusers.LCMScheduler(),
    ],
    ids=lambda s: type(s).__name__,
)
def test_state_and_noise_do_not_matter(scheduler):
    """The responses, superposed, are the sample that any answers end in."""
    found = responses(ready(scheduler))
    count = len(scheduler.timesteps)
    answers = torch.randn(count, generator=torch.Generator().manual_seed(5)) * 1e-3

    def final(values):
        fresh = ready(type(scheduler).from_config(scheduler.config))
        noise = {"generator": torch.Generator().manual_seed(7)}
        if type(scheduler).__name__ in {"UniPCMultistepScheduler", "PNDMScheduler"}:
            noise = {}
        if type(scheduler).__name__ == "HeunDiscreteScheduler":
            noise = {}
        x = torch.zeros(1, 1, 1, 1)
        for t, value in zip(fresh.timesteps, values, strict=True):
            if hasattr(fresh, "scale_model_input"):
                fresh.scale_model_input(x, t)
            x = fresh.step(value.reshape(1, 1, 1, 1), t, x, return_dict=False, **noise)[0]
        return float(x)

    moved = final(answers) - final(torch.zeros(count))
    wanted = float((found * answers.double()).sum())
    assert moved == pytest.approx(wanted, abs=2e-2 * float((found * answers).abs().max()))
    assert sum(step_weights(scheduler, "schedule").values()) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        diffusers.EulerDiscreteScheduler(),
        diffusers.DPMSolverMultistepScheduler(),
        ddim(),
        diffusers.EulerAncestralDiscreteScheduler(),
    ],
    ids=lambda s: type(s).__name__,
)
def test_timesteps_on_a_gpu_weigh_the_same(scheduler):
    expected = responses(ready(scheduler))
    scheduler.set_timesteps(10, device="cuda")
    torch.testing.assert_close(responses(scheduler), expected, rtol=1e-3, atol=1e-4)


def test_weights_leave_the_scheduler_as_it_was():
    scheduler = ready(diffusers.DPMSolverMultistepScheduler())
    step_weights(scheduler, "schedule")
    assert scheduler.step_index is None
    assert scheduler.lower_order_nums == 0


def test_uniform_weights_are_one_and_scheduled_ones_have_mean_one():
    scheduler = ready(ddim(prediction_type="v_prediction"))
    assert set(step_weights(scheduler, "uniform").values()) == {1.0}
    weights = step_weights(scheduler, "schedule")
    assert list(weights) == [float(t) for t in scheduler.timesteps]
    assert sum(weights.values()) / len(weights) == pytest.approx(1)
    assert min(weights.values()) < 0.5
    assert max(weights.values()) > 1.5


@pytest.mark.parametrize(
    ("first", "unit"), [(0, 1.0), (3, 1.0), (0, 1e-3)], ids=["SD", "from a picture", "Flux"]
)
def test_weights_of_calls_are_in_the_unit_of_their_timesteps(first, unit):
    scheduler = ready(ddim(prediction_type="v_prediction"))
    steps = [float(step) for step in scheduler.timesteps]
    weights = CallWeights.at_first_call(scheduler, "schedule", unit * steps[first])
    expected = step_weights(scheduler, "schedule")
    assert [weights.at(unit * step) for step in steps] == [expected[step] for step in steps]
    assert weights.at(unit * (steps[4] + 1)) == expected[steps[4]]


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (diffusers.DDPMScheduler(clip_sample=True), "cannot be repeated"),
        (diffusers.RePaintScheduler(), "cannot be measured"),
    ],
    ids=["clips", "other-signature"],
)
def test_schedulers_without_such_weights_are_refused(scheduler, words):
    with pytest.raises(RecipeError, match=rf"{words}.*set it to uniform"):
        step_weights(ready(scheduler, 20), "schedule")


class Squaring(diffusers.DDIMScheduler):
    def step(self, model_output, timestep, sample, return_dict=True):
        return (sample + model_output**2,)


def test_a_scheduler_that_is_not_linear_is_refused():
    with pytest.raises(RecipeError, match=r"Squaring is not linear .* set it to uniform"):
        step_weights(ready(Squaring()), "schedule")


class Noisy(diffusers.DDIMScheduler):
    def step(self, model_output, timestep, sample, return_dict=True):
        noise = torch.linspace(0, 1e-6, len(sample)).reshape(-1, 1, 1, 1)
        return (sample + model_output + noise,)


def test_noise_that_differs_by_row_is_refused_however_small():
    with pytest.raises(RecipeError, match="Noisy clips its samples or adds noise"):
        step_weights(ready(Noisy()), "schedule")


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(6, 4),
        nn.Conv2d(6, 4, 1),
        nn.Conv2d(6, 4, 3, padding=1),
        nn.Conv2d(6, 4, 3, stride=2, padding=(1, 0), dilation=(1, 2)),
    ],
    ids=["linear", "1x1", "3x3", "strided"],
)
def test_moments_are_those_of_the_rows_that_make_the_output(module):
    """The power of the output by the moments is the power of the output."""
    total = MomentSum(module, "layer", 1.0, 0)
    shape = (3, 6, 9, 8) if isinstance(module, nn.Conv2d) else (3, 5, 6)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) + 0.5 for i in (1, 2)]
    for x, weight in zip(inputs, (1.0, 3.0), strict=True):
        add_input(total, x, weight)
    moments = total.moments()
    rows = to_rows(module.weight.detach())
    outputs = [
        functional.conv2d(
            x, module.weight, None, module.stride, module.padding, module.dilation
        ).movedim(1, -1)
        if isinstance(module, nn.Conv2d)
        else functional.linear(x, module.weight)
        for x in inputs
    ]
    flat = [y.detach().reshape(-1, 4) for y in outputs]
    count = len(flat[0])
    assert moments.rows == 2 * count
    power = (flat[0].T @ flat[0] + 3 * flat[1].T @ flat[1]) / (4 * count)
    torch.testing.assert_close(rows @ moments.second @ rows.T, power, rtol=1e-4, atol=1e-5)
    mean = (flat[0].sum(0) + 3 * flat[1].sum(0)) / (4 * count)
    torch.testing.assert_close(rows @ moments.mean, mean, rtol=1e-4, atol=1e-5)
    centred = rows @ moments.covariance @ rows.T
    torch.testing.assert_close(centred, power - torch.outer(mean, mean), rtol=1e-4, atol=1e-5)
