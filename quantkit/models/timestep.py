"""The timestep that a denoiser is called with, in the unit of that call, and its bucket."""

import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quantkit.errors import ModelError, RecipeError

#: What denoisers call it: nearly all, HiDream, Stable Cascade, Z-Image.
NAMES = ("timestep", "timesteps", "timestep_ratio", "t")


def timestep_argument(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the timestep of one call of a denoiser's forward.

    Args:
        forward: the bound method, whose signature places positional arguments.
        args: what it is called with, as a forward pre-hook sees it.
        kwargs: what it is called with, as a forward pre-hook sees it.

    Returns:
        a tensor of one or more equal values, or a number; SD passes 0 to 1000, Flux 0 to 1; 0 for
        models that are not told.
    """
    # Most calls name it: a signature takes longer to read than to look.
    found: Mapping[str, Any] = kwargs
    if not any(name in kwargs for name in NAMES):
        found = inspect.signature(forward).bind(*args, **kwargs).arguments
    return next((found[name] for name in NAMES if name in found), 0.0)


def first_number(timestep: Any) -> float:
    """Return a timestep as a number: of a batch, the first; it waits for the device."""
    return float(torch.as_tensor(timestep).reshape(-1)[0])


def bucket_of(timestep: float, edges: Sequence[float]) -> int:
    """Return the bucket: how many of the ascending edges are at most ``timestep``."""
    return bisect_right(edges, timestep)


def split_schedule(scheduler: Any, first: float, buckets: int) -> tuple[float, ...]:
    """Return the edges that give every bucket the same number of steps, give or take one.

    Args:
        scheduler: of diffusers, its timesteps set.
        first: the timestep of the first call. Its ratio to the scheduler's first one is the unit
            that the denoiser is called in: 1 for SD, 1 / 1000 for Flux.
        buckets: how many.

    Returns:
        buckets - 1 ascending timesteps, each halfway between two steps, in the denoiser's unit.

    Raises:
        RecipeError: fewer distinct steps than buckets.
        ModelError: the denoiser is not called with a multiple of the scheduler's timesteps.
    """
    if buckets == 1:
        return ()
    steps = [float(step) for step in scheduler.timesteps]
    unit = first / steps[0] if steps[0] else 0.0
    if unit <= 0:
        raise ModelError(
            f"the denoiser is called with timestep {first:g}, but the scheduler says "
            f"{steps[0]:g}, so calls cannot be sorted into timestep buckets; set "
            "calibration.buckets to 1"
        )
    distinct = sorted(set(steps))
    if len(distinct) < buckets:
        raise RecipeError(
            f"calibration.buckets {buckets}: the schedule has {len(distinct)} steps; take fewer "
            "buckets or more steps"
        )
    cuts = [round(i * len(distinct) / buckets) for i in range(1, buckets)]
    return tuple(unit * (distinct[cut - 1] + distinct[cut]) / 2 for cut in cuts)
