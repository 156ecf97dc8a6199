"""Weights of a schedule's steps: the effect of an error of the denoiser there on the sample.

A scheduler's step is linear in the denoiser's answer, so the final sample is a linear function of
all answers. The weight of step i is the square of its coefficient: an error of variance 1 in that
answer, the others held, adds so much variance to the sample. The coefficient is not derived here
but measured, by running the scheduler itself on scalars.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RecipeError

#: Small, so that a scheduler that clips its estimate of the clean sample is in its linear range.
_PROBE = 1e-3
#: Schedulers compute in float32 and their noise is about 1: this is what remains of _PROBE there.
_TOLERANCE = 1e-2

_CURE = "set it to uniform: '--set calibration.weighting=uniform'"


@dataclass(frozen=True)
class CallWeights:
    """Weights of a denoiser's calls, by the timesteps that it is called with."""

    by_timestep: Mapping[float, float]

    @classmethod
    def at_first_call(cls, scheduler: Any, weighting: str, timestep: float) -> "CallWeights":
        """Return ``step_weights`` in the unit of the denoiser's calls.

        Args:
            scheduler: as of ``step_weights``.
            weighting: ``uniform`` or ``schedule``.
            timestep: of the first call. The unit is 1 where it is the scheduler's own, as for SD,
                also after the first; else its ratio to the first one: 1 / 1000 for Flux.

        Raises:
            RecipeError: as ``step_weights``.
        """
        weights = step_weights(scheduler, weighting)
        start = next(iter(weights))
        unit = 1.0 if timestep in weights or not start else timestep / start
        return cls({unit * step: weight for step, weight in weights.items()})

    def at(self, timestep: float) -> float:
        """Return the weight of a call: of the nearest timestep."""
        nearest = min(self.by_timestep, key=lambda step: abs(step - timestep))
        return self.by_timestep[nearest]


def step_weights(scheduler: Any, weighting: str) -> dict[float, float]:
    """Return the weight of every timestep of a schedule; their mean over the steps is 1.

    Args:
        scheduler: of diffusers, its timesteps set and no step taken; it stays as it is.
        weighting: ``uniform`` or ``schedule``.

    Returns:
        by timestep, in the scheduler's unit. Where solvers of higher order visit a timestep more
        than once, the mean of its visits.

    Raises:
        RecipeError: the sample is not a linear function of the answers, or noise that cannot be
            repeated is added: the steps of such a scheduler have no such weight.
    """
    steps = [float(step) for step in scheduler.timesteps]
    if weighting == "uniform":
        return dict.fromkeys(steps, 1.0)
    power = responses(scheduler).square()
    power /= power.mean()
    visits = {step: [i for i, other in enumerate(steps) if other == step] for step in steps}
    return {step: float(power[places].mean()) for step, places in visits.items()}


def responses(scheduler: Any) -> Tensor:
    """Return the change of the final sample per unit of each answer, float64 (steps,).

    Raises:
        RecipeError: as ``step_weights``.
    """
    count = len(scheduler.timesteps)
    # Rows: one for every step, moved alone, once by the probe and once by twice as much; and two
    # that nothing moves, which must end equal.
    moved = torch.eye(count) * _PROBE
    answers = torch.cat((moved, 2 * moved, torch.zeros(2, count)))
    name = type(scheduler).__name__
    try:
        final = _run(copy.deepcopy(scheduler), answers).double()
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(
            f"calibration.weighting schedule: {name} cannot be measured ({reason}); {_CURE}"
        ) from error
    once, twice, still = final[:count], final[count:-2], final[-2:]
    once, twice = once - still[0], (twice - still[0]) / 2
    size = once.abs().max()
    if not bool(final.isfinite().all()) or bool(still[0] != still[1]) or not size > 0:
        raise RecipeError(
            f"calibration.weighting schedule: {name} clips its samples or adds noise that cannot "
            f"be repeated, so the effect of a step cannot be measured; {_CURE}"
        )
    if bool((once - twice).abs().max() > _TOLERANCE * size):
        raise RecipeError(
            f"calibration.weighting schedule: {name} is not linear in the denoiser's answer; "
            f"{_CURE}"
        )
    return once / _PROBE


def _run(scheduler: Any, answers: Tensor) -> Tensor:
    """Return the final scalar of every row of answers (rows, steps), from a sample of zero."""
    rows = len(answers)
    shape = (rows, 1, 1, 1)
    noise: dict[str, Any] = {}
    if "generator" in inspect.signature(scheduler.step).parameters:
        # Every row sees the same noise, so that rows differ by their answers alone.
        noise = {"generator": [torch.Generator().manual_seed(0) for _ in range(rows)]}
    # Schedulers keep their sigmas where their timesteps are, or on the CPU as scalars.
    device = scheduler.timesteps.device
    sample, answers = torch.zeros(shape, device=device), answers.to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for i, step in enumerate(scheduler.timesteps):
            if hasattr(scheduler, "scale_model_input"):
                scheduler.scale_model_input(sample, step)
            answer = answers[:, i].reshape(shape)
            sample = scheduler.step(answer, step, sample, return_dict=False, **noise)[0]
    return sample.reshape(rows).cpu()
