"""The knapsack against brute force."""

import itertools
import math
import random

import pytest

from quantkit.sensitivity import knapsack
from quantkit.sensitivity.knapsack import Option


def brute_force(items, limit):
    """Return the least loss of all combinations within the limit, or None."""
    losses = [
        math.fsum(o.loss for o in picked)
        for picked in itertools.product(*items)
        if math.fsum(o.cost for o in picked) <= limit
    ]
    return min(losses, default=None)


def test_solutions_are_within_a_step_of_the_best():
    for seed in range(200):
        check_solution(random.Random(seed))


def check_solution(rng):
    items = [
        [
            Option(rng.choice([rng.random(), rng.randrange(4) / 4]), rng.random() ** 4)
            for _ in range(rng.randint(1, 5))
        ]
        for _ in range(rng.randint(1, 5))
    ]
    limit = rng.random() * sum(max(o.cost for o in item) for item in items)
    best, picked = brute_force(items, limit), knapsack.solve(items, limit)
    if best is None:
        assert picked is None
        return
    chosen = [options[index] for options, index in zip(items, picked, strict=True)]
    assert math.fsum(o.cost for o in chosen) <= limit + 1e-12
    largest = max((step.gain for step in knapsack.steps_of(items)), default=0.0)
    loss = math.fsum(o.loss for o in chosen)
    assert best - 1e-12 <= loss <= best + largest + 1e-12


def test_solution_is_the_best_where_the_walk_stops_on_the_limit():
    rng = random.Random(7)
    items = [[Option(rng.random(), rng.random()) for _ in range(4)] for _ in range(5)]
    for picked in knapsack.walk(items):
        chosen = [options[index] for options, index in zip(items, picked, strict=True)]
        limit = math.fsum(o.cost for o in chosen) + 1e-12
        assert math.fsum(o.loss for o in chosen) == pytest.approx(brute_force(items, limit))


def test_walk_goes_from_least_cost_to_least_loss_by_convex_steps():
    items = [[Option(0, 9), Option(1, 4), Option(2, 3.9), Option(3, 0)], [Option(5, 1)]]
    assert knapsack.lower_hull(items[0]) == (0, 1, 3)
    assert knapsack.walk(items) == ((0, 0), (1, 0), (3, 0))


def test_dominated_and_equal_options_are_never_on_the_hull():
    options = [Option(1, 1), Option(1, 1), Option(2, 1), Option(1, 2), Option(0.5, 3)]
    assert knapsack.lower_hull(options) == (4, 0)
    assert knapsack.lower_hull([Option(0, 0)]) == (0,)


def test_nothing_within_the_limit_is_none():
    assert knapsack.solve([[Option(2, 0), Option(3, 0)]], 1.9) is None
    assert knapsack.solve([], 0) == ()


def test_what_is_left_goes_to_options_off_the_hull():
    # The hull has only 0 and 1: the middle, above it, is what still fits.
    items = [[Option(0, 1), Option(3, 0.9), Option(4, 0)]]
    assert knapsack.solve(items, 3.5) == (1,)
