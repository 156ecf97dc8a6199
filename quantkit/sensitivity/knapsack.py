"""The multiple-choice knapsack: one option per item, least loss within a limit on the sum of costs.

Relaxed, it is solved by the lower convex hull of each item's (cost, loss) points, walked in the
order of falling gain per cost; the walk visits every solution of the Lagrangian in turn. Greedy on
hulls is off the optimum by less than the loss of one step, and swaps that fit close part of that.
Nothing depends on hashing, on floating-point sums in another order, or on chance.

Source: Sinha and Zoltners 1979, The Multiple-Choice Knapsack Problem, Operations Research 27(3);
the Lagrangian view as in Shoham and Gersho 1988, IEEE Trans. ASSP 36(9).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum


@dataclass(frozen=True)
class Option:
    """The cost and loss of one option; neither is negative."""

    cost: float
    loss: float


@dataclass(frozen=True)
class HullStep:
    """A walk along one item's hull: more cost, less loss."""

    item: int
    #: positions among the item's options
    before: int
    after: int
    cost: float
    #: of loss
    gain: float


#: One position among its options per item.
Indices = tuple[int, ...]


def lower_hull(options: Sequence[Option]) -> tuple[int, ...]:
    """Return the options on the lower convex hull, cost rising and loss falling, by position.

    Args:
        options: at least one; of equal ones the first counts.
    """
    order = sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].loss, i))
    hull: list[int] = []
    for index in order:
        if hull and options[index].loss >= options[hull[-1]].loss:
            continue
        while len(hull) > 1 and _above(options[hull[-2]], options[hull[-1]], options[index]):
            hull.pop()
        hull.append(index)
    return tuple(hull)


def steps_of(items: Sequence[Sequence[Option]]) -> tuple[HullStep, ...]:
    """Return the steps of all hulls by falling gain per cost; ties go to the earlier item.

    Along one item's hull gain per cost falls, so its steps stand in their order.
    """
    steps = [
        HullStep(
            item,
            before,
            after,
            options[after].cost - options[before].cost,
            options[before].loss - options[after].loss,
        )
        for item, options in enumerate(items)
        for before, after in pairwise(lower_hull(options))
    ]
    return tuple(sorted(steps, key=lambda step: -step.gain / step.cost))


def cheapest(items: Sequence[Sequence[Option]]) -> Indices:
    """Return the option of least cost of every item; of those the one of least loss."""
    return tuple(lower_hull(options)[0] for options in items)


def walk(items: Sequence[Sequence[Option]]) -> tuple[Indices, ...]:
    """Return the Lagrangian's solutions from least cost to least loss, one step apart."""
    path = [list(cheapest(items))]
    for step in steps_of(items):
        path.append([*path[-1]])
        path[-1][step.item] = step.after
    return tuple(map(tuple, path))


def solve(items: Sequence[Sequence[Option]], limit: float) -> Indices | None:
    """Return one option per item, of small total loss, whose costs sum up to at most ``limit``.

    Args:
        items: the options of each.
        limit: on the sum of costs.

    Returns:
        positions; None when even the cheapest options cost more.
    """
    chosen = list(cheapest(items))
    room = limit - fsum(options[index].cost for options, index in zip(items, chosen, strict=True))
    if room < 0:
        return None
    stuck: set[int] = set()
    for step in steps_of(items):
        # An item whose step does not fit stays: its later steps start where it never came.
        if step.item in stuck or step.cost > room:
            stuck.add(step.item)
        else:
            chosen[step.item] = step.after
            room -= step.cost
    return tuple(_swapped(items, chosen, room))


def _swapped(items: Sequence[Sequence[Option]], chosen: list[int], room: float) -> list[int]:
    """Spend what is left: the single swap of most gain that fits, again and again."""
    while True:
        best, gain, cost = None, 0.0, 0.0
        for item, options in enumerate(items):
            now = options[chosen[item]]
            for index, option in enumerate(options):
                if now.loss - option.loss > gain and option.cost - now.cost <= room:
                    best, gain, cost = (item, index), now.loss - option.loss, option.cost - now.cost
        if best is None:
            return chosen
        chosen[best[0]] = best[1]
        room -= cost


def _above(left: Option, middle: Option, right: Option) -> bool:
    """Tell whether the middle lies on or above the line between its neighbours."""
    return (middle.loss - left.loss) * (right.cost - left.cost) >= (right.loss - left.loss) * (
        middle.cost - left.cost
    )
