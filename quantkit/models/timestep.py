"""The timestep that a denoiser is called with, in the unit of that call, and its bucket."""

import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def timestep_argument(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the ``timestep`` of one call of a denoiser's forward.

    Args:
        forward: the bound method, whose signature places positional arguments.
        args: what it is called with, as a forward pre-hook sees it.
        kwargs: likewise.

    Returns:
        a tensor of one or more equal values, or a number; SD passes 0 to 1000, Flux 0 to 1.
    """
    if "timestep" in kwargs:
        return kwargs["timestep"]
    return inspect.signature(forward).bind(*args, **kwargs).arguments["timestep"]


def bucket_of(timestep: float, edges: Sequence[float]) -> int:
    """Return the bucket: how many of the ascending edges are at most ``timestep``."""
    return bisect_right(edges, timestep)
