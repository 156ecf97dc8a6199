"""Granularities: the groups of elements of a weight that share one scale."""

from dataclasses import dataclass

from quantkit.errors import RecipeError, ShapeError


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole weight, shape []."""

    def __str__(self) -> str:
        return "tensor"


@dataclass(frozen=True)
class PerChannel:
    """One scale per output channel, shape [N]."""

    def __str__(self) -> str:
        return "channel"


@dataclass(frozen=True)
class PerGroup:
    """One scale per ``size`` consecutive weights along K, shape [N, K / size]."""

    size: int

    def __str__(self) -> str:
        return f"group:{self.size}"


Granularity = PerTensor | PerChannel | PerGroup


def parse_granularity(text: str) -> Granularity:
    """Return the granularity written as ``tensor``, ``channel`` or ``group:SIZE``.

    Raises:
        RecipeError: anything else.
    """
    name, _, size = text.partition(":")
    if name == "tensor" and not size:
        return PerTensor()
    if name == "channel" and not size:
        return PerChannel()
    if name == "group" and size.isascii() and size.isdigit() and int(size) > 0:
        return PerGroup(int(size))
    raise RecipeError(
        f"granularity {text!r}: unknown, expected tensor, channel or group:SIZE (as group:128)"
    )


def scale_shape(granularity: Granularity, n: int, k: int) -> tuple[int, ...]:
    """Return the shape of the scales of an [n, k] weight.

    Raises:
        ShapeError: k is not a multiple of the group size.
    """
    match granularity:
        case PerTensor():
            return ()
        case PerChannel():
            return (n,)
        case PerGroup(size):
            if k % size:
                raise ShapeError(
                    f"K {k} is not a multiple of group size {size}; use channel or another size"
                )
            return (n, k // size)
