"""Outlines of the world's shapes as signed distances, negative inside, in units of the radius.

Every function takes offsets from the centre (x to the right, y downwards) as tensors of one shape
and returns a tensor of that shape. Distances are exact along straight edges and a lower bound
at corners, which is all that antialiasing one pixel wide needs. The sizes are chosen so that the
areas look alike: a cross and a circle of one radius must both read as "large".
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_FIFTH = 2 * math.pi / 5


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 1


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.86


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    low = y - 0.22  # the bounding box, not the centroid, is centred
    return torch.maximum(low, 0.5 * math.sqrt(3) * x.abs() - 0.5 * low) - 0.58


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    return (x.abs() / 0.8 + y.abs() / 1.1 - 1) * 0.65


def _star(x: Tensor, y: Tensor) -> Tensor:
    # Fold the plane onto half of one point of the star, whose edge is then one straight line.
    length = torch.hypot(x, y)
    turn = torch.atan2(x, -y)
    folded = torch.remainder(turn + _FIFTH / 2, _FIFTH) - _FIFTH / 2
    along, across = length * torch.cos(folded), length * torch.sin(folded).abs()
    tip, notch = 1.18, 0.5
    notch_x, notch_y = notch * math.cos(_FIFTH / 2), notch * math.sin(_FIFTH / 2)
    edge = math.hypot(notch_y, tip - notch_x)
    return ((along - tip) * notch_y + across * (tip - notch_x)) / edge


def _cross(x: Tensor, y: Tensor) -> Tensor:
    wide, high = x.abs(), y.abs()
    return torch.maximum(torch.minimum(wide, high) - 0.36, torch.maximum(wide, high) - 1)


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.7).abs() - 0.32


def _heart(x: Tensor, y: Tensor) -> Tensor:
    # A square on its corner of half diagonal c and a disc over each of its upper sides.
    c = 0.84
    wide, low = x.abs(), y - 0.1 * c
    corner = (wide + low.abs() - c) / math.sqrt(2)
    disc = torch.hypot(wide - c / 2, low + c / 2) - c / math.sqrt(2)
    return torch.minimum(corner, disc)


#: What the captions call each outline, and its signed distance.
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "heart": _heart,
}


def signed_distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the signed distance of every point to the outline that its picture asks for.

    Args:
        shape: (n,) int64, rows of SHAPES.
        x: (n, height, width), offset to the right of the centre, in radii.
        y: (n, height, width), offset below the centre, in radii.

    Returns:
        (n, height, width), negative inside, in radii.
    """
    distance = torch.zeros_like(x)
    for row, outline in enumerate(SHAPES.values()):
        distance = torch.where((shape == row)[:, None, None], outline(x, y), distance)
    return distance
