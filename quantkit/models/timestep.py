"""The timestep that a denoiser is called with, in the unit of that call, and its bucket."""

import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def bucket_of(timestep: float, edges: Sequence[float]) -> int:
    """Return the bucket: how many of the ascending edges are at most ``timestep``."""
    return bisect_right(edges, timestep)
