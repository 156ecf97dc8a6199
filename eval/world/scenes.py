"""Scenes of the world, drawn at random, with a caption each.

A scene is exactly what its caption says; where things stand to the pixel is a Layout (layout.py),
and the picture is made from both (render.py). Scenes are batches of integer tensors, rows of the
tables below, so that drawing and captioning stay vectorised.
"""

from dataclasses import dataclass, replace

import torch
from quantkit.eval.world.outlines import SHAPES
from torch import Generator, Tensor

#: Word in the caption and linear mixing colour, red green blue in [0, 1].
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.87, 0.11, 0.14),
    "orange": (0.98, 0.52, 0.05),
    "yellow": (0.98, 0.88, 0.14),
    "green": (0.12, 0.60, 0.22),
    "cyan": (0.14, 0.80, 0.86),
    "blue": (0.12, 0.28, 0.85),
    "purple": (0.50, 0.16, 0.66),
    "pink": (0.97, 0.56, 0.76),
    "white": (0.96, 0.96, 0.96),
    "black": (0.06, 0.06, 0.07),
}
SIZES = ("small", "large")
#: "solid" is the fill that captions do not mention.
FILLS = ("solid", "striped", "dotted", "outlined")
#: "alone" is the relation of a single object, and no word of any caption.
RELATIONS = ("alone", "left of", "right of", "above", "below")
PATTERNS = ("plain", "gradient", "striped", "checkered", "dotted")

ALONE = RELATIONS.index("alone")
#: The relation that the same picture shows when the two objects are named the other way round.
_CONVERSE = tuple(
    RELATIONS.index(name) for name in ("alone", "right of", "left of", "below", "above")
)
#: Relations whose first object stands further left or further up.
_FORWARD = tuple(RELATIONS.index(name) for name in ("left of", "above"))
#: A quarter of the pictures shows one object; more would leave binding too little practice.
_ALONE_SHARE = 0.25


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes; object 1 is drawn at random and unused where the relation is "alone"."""

    relation: Tensor  #: (n,) int64, rows of RELATIONS: how object 0 stands to object 1
    shape: Tensor  #: (n, 2) int64, rows of SHAPES
    colour: Tensor  #: (n, 2) int64, rows of COLOURS, different from each other and from the ground
    size: Tensor  #: (n, 2) int64, rows of SIZES
    fill: Tensor  #: (n, 2) int64, rows of FILLS
    ground: Tensor  #: (n,) int64, rows of COLOURS
    pattern: Tensor  #: (n,) int64, rows of PATTERNS

    def __len__(self) -> int:
        return len(self.relation)

    def __getitem__(self, rows: slice | Tensor) -> "Scenes":
        return Scenes(**{name: value[rows] for name, value in vars(self).items()})

    def to(self, device: torch.device | str) -> "Scenes":
        """Return the same scenes on another device."""
        return Scenes(**{name: value.to(device) for name, value in vars(self).items()})


def draw_scenes(count: int, generator: Generator) -> Scenes:
    """Draw scenes independently of each other; equal generators give equal scenes.

    Args:
        count: how many.
        generator: source of all randomness; its device is the device of the scenes.

    Returns:
        ``count`` scenes, in which no two colours of one picture are the same.
    """
    device = generator.device

    def rows(table_length: int, *shape: int) -> Tensor:
        return torch.randint(table_length, shape, generator=generator, device=device)

    # The first three of a random order of the colours: distinct without rejection.
    order = torch.rand(count, len(COLOURS), generator=generator, device=device).argsort(dim=1)
    alone = torch.rand(count, generator=generator, device=device) < _ALONE_SHARE
    return Scenes(
        relation=torch.where(alone, ALONE, 1 + rows(len(RELATIONS) - 1, count)),
        shape=rows(len(SHAPES), count, 2),
        colour=order[:, 1:3],
        size=rows(len(SIZES), count, 2),
        fill=rows(len(FILLS), count, 2),
        ground=order[:, 0],
        pattern=rows(len(PATTERNS), count),
    )


def vary_scenes(scenes: Scenes, generator: Generator) -> Scenes:
    """Return scenes whose captions differ from the given ones in exactly one respect.

    These are the hard negatives of contrastive training: a shape, size, fill or pattern is
    replaced, two colours are exchanged, or the relation is reversed.
    """
    count, device = len(scenes), generator.device
    pair = scenes.relation != ALONE
    choice = torch.randint(6, (count,), generator=generator, device=device)
    choice = torch.where(~pair & (choice == 5), 4, choice)
    slot = torch.randint(2, (count,), generator=generator, device=device) * pair
    chosen = torch.nn.functional.one_hot(slot, 2)

    def other(rows: Tensor, table_length: int, change: Tensor) -> Tensor:
        step = torch.randint(1, table_length, rows.shape, generator=generator, device=device)
        return torch.where(change, (rows + step) % table_length, rows)

    def at(index: int) -> Tensor:
        return (choice == index)[:, None] & (chosen == 1)

    swap = choice == 3
    first, second = scenes.colour.unbind(1)
    partner = torch.where(pair, second, scenes.ground)
    converse = torch.tensor(_CONVERSE, device=device)[scenes.relation]
    return replace(
        scenes,
        shape=other(scenes.shape, len(SHAPES), at(0)),
        size=other(scenes.size, len(SIZES), at(1)),
        fill=other(scenes.fill, len(FILLS), at(2)),
        colour=torch.stack(
            (torch.where(swap, partner, first), torch.where(swap & pair, first, second)), dim=1
        ),
        ground=torch.where(swap & ~pair, first, scenes.ground),
        pattern=other(scenes.pattern, len(PATTERNS), choice == 4),
        relation=torch.where(choice == 5, converse, scenes.relation),
    )


def order_scenes(scenes: Scenes) -> Scenes:
    """Name the object on the left or on top first, so that one picture has one description.

    The unused object of a scene with one object becomes all zeros.
    """
    device = scenes.relation.device
    forward = torch.isin(scenes.relation, torch.tensor((ALONE, *_FORWARD), device=device))
    pair = scenes.relation != ALONE
    converse = torch.tensor(_CONVERSE, device=device)[scenes.relation]
    used = torch.stack((torch.ones_like(pair), pair), dim=1)

    def turn(rows: Tensor) -> Tensor:
        return torch.where(forward[:, None], rows, rows.flip(1)) * used

    return replace(
        scenes,
        relation=torch.where(forward, scenes.relation, converse),
        **{name: turn(getattr(scenes, name)) for name in ("shape", "colour", "size", "fill")},
    )


def draw_distinct_scenes(count: int, generator: Generator) -> Scenes:
    """Draw scenes of which no two look alike, whichever way round their objects are named."""
    scenes = draw_scenes(2 * count, generator)
    ordered = order_scenes(scenes)
    rows = torch.cat([value.reshape(2 * count, -1) for value in vars(ordered).values()], dim=1)
    first: dict[tuple[int, ...], int] = {}
    for index, row in enumerate(rows.tolist()):
        first.setdefault(tuple(row), index)
    # The world has over ten million scenes: half of a double draw is always left.
    assert len(first) >= count
    return scenes[torch.tensor(list(first.values())[:count], device=rows.device)]


def captions(scenes: Scenes) -> list[str]:
    """Return the English sentence for each scene, without a full stop."""
    columns = {name: value.tolist() for name, value in vars(scenes).items()}
    return [
        _caption(**{name: values[index] for name, values in columns.items()})
        for index in range(len(scenes))
    ]


def _caption(
    *,
    relation: int,
    shape: list[int],
    colour: list[int],
    size: list[int],
    fill: list[int],
    ground: int,
    pattern: int,
) -> str:
    colours, shapes = tuple(COLOURS), tuple(SHAPES)

    def thing(slot: int) -> str:
        words = [SIZES[size[slot]], colours[colour[slot]], FILLS[fill[slot]], shapes[shape[slot]]]
        return "a " + " ".join(word for word in words if word != "solid")

    objects = thing(0)
    if relation != ALONE:
        objects += f" {RELATIONS[relation]} {thing(1)}"
    return f"{objects} on {_background(colours[ground], PATTERNS[pattern])}"


def _background(colour: str, pattern: str) -> str:
    words = f"plain {colour}" if pattern == "plain" else f"{colour} {pattern}"
    article = "an" if words[0] in "aeiou" else "a"
    return f"{article} {words} background"
