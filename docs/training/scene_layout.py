"""Layouts of scenes: the place of each thing to the pixel, and its shift of colour."""

from dataclasses import dataclass

import torch
from quantkit.eval.world.scenes import ALONE, COLOURS, RELATIONS, SIZES, Scenes
from torch import Generator, Tensor

#: Side of a picture in pixels, and the unit of every length below.
SIDE = 64
#: Radius ranges in pixels by (object count, size): the sizes of a pair must both fit in one half.
_RADII = {
    ("alone", "small"): (9.0, 10.5),
    ("alone", "large"): (20.0, 23.0),
    ("pair", "small"): (7.8, 8.8),
    ("pair", "large"): (13.2, 14.6),
}
#: How far a centre may wander, in pixels: alone; along and across the line between a pair.
_WANDER_ALONE, _WANDER_ALONG, _WANDER_ACROSS = 6.0, 1.2, 6.0
#: A large object alone may not leave the picture.
_MARGIN = 1.5
#: Colours wander by this much per channel, so that a colour word is a range and not a constant.
_TINT = 0.03


@dataclass(frozen=True)
class Layout:
    """Positions in pixels and colours of a batch of scenes."""

    centre: Tensor  #: (n, 2, 2) float32: object, then x to the right and y downwards
    radius: Tensor  #: (n, 2) float32
    paint: Tensor  #: (n, 3, 3) float32: object 0, object 1, ground; red green blue in [0, 1]
    phase: Tensor  #: (n, 2) float32 in [0, 1): where the background's pattern starts


def lay_out(scenes: Scenes, generator: Generator) -> Layout:
    """Place every scene's objects at random, as its relation and sizes demand.

    Args:
        scenes: on the generator's device.
        generator: source of all randomness.

    Returns:
        The layout, on the same device. Objects never overlap, and the relation of a pair holds
        for the whole of both objects.
    """
    count, device = len(scenes), generator.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    pair = scenes.relation != ALONE
    radius = _radius(scenes, pair, uniform(count, 2))
    centre = _centre(scenes.relation, pair, 2 * uniform(count, 2, 2) - 1)
    reach = SIDE / 2 - _MARGIN - radius[..., None]
    centre = torch.where(
        pair[:, None, None], centre, SIDE / 2 + torch.clamp(centre - SIDE / 2, -reach, reach)
    )
    table = torch.tensor(list(COLOURS.values()), device=device)
    base = table[torch.cat((scenes.colour, scenes.ground[:, None]), dim=1)]
    paint = (base + _TINT * (2 * uniform(count, 3, 3) - 1)).clamp(0, 1)
    return Layout(centre=centre, radius=radius, paint=paint, phase=uniform(count, 2))


def _radius(scenes: Scenes, pair: Tensor, uniform: Tensor) -> Tensor:
    ranges = torch.tensor(
        [[_RADII[number, size] for size in SIZES] for number in ("alone", "pair")],
        device=uniform.device,
    )
    low, high = ranges[pair.long()[:, None], scenes.size].unbind(-1)
    return low + (high - low) * uniform


def _centre(relation: Tensor, pair: Tensor, uniform: Tensor) -> Tensor:
    # Unit vector from the picture's middle to object 0; object 1 stands opposite.
    towards = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
    table = torch.tensor(
        [towards.get(name, (0, 0)) for name in RELATIONS],
        dtype=torch.float32,
        device=uniform.device,
    )
    along = table[relation]
    sides = torch.stack((along, -along), dim=1)
    wander = torch.where(along.abs() > 0, _WANDER_ALONG, _WANDER_ACROSS)
    wander = torch.where(pair[:, None], wander, _WANDER_ALONE)
    return SIDE / 2 + sides * (SIDE / 4) + wander[:, None, :] * uniform
