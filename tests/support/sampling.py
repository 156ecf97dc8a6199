"""What `make test` runs of many rows that are alike; the rest is exhaustive: `make test-all`."""

from itertools import combinations, product

import pytest


def one_of_each(rows, kind):
    """Yield rows as parameters of a test; all but the first of a kind are exhaustive."""
    seen = set()
    for row in rows:
        known = kind(row) in seen
        seen.add(kind(row))
        yield pytest.param(row, marks=pytest.mark.exhaustive if known else ())


def cover(rows, goals):
    """Return few of the rows, in which every goal of any row stands."""
    left = {goal for row in rows for goal in goals(row)}
    chosen = []
    while left:
        chosen.append(max(rows, key=lambda row: len(left & goals(row))))
        left -= goals(chosen[-1])
    return chosen


def paired(rows):
    """Yield rows of values as parameters, a tuple each; those without a new pair are exhaustive."""
    rows = [tuple(row) for row in rows]
    few = {*map(repr, cover(rows, _pairs))}
    for row in rows:
        marks = () if repr(row) in few else pytest.mark.exhaustive
        yield pytest.param(row, marks=marks, id="-".join(map(_name, row)))


def turned(first, *others, times=1):
    """Yield a product as parameters, a tuple each: of each value of the first axis ``times``
    combinations of the others, which take turns; the rest is exhaustive."""
    rest = list(product(*others))
    for index, value in enumerate(first):
        for at, more in enumerate(rest):
            late = (at - times * index) % len(rest) >= times
            marks = pytest.mark.exhaustive if late else ()
            yield pytest.param((value, *more), marks=marks, id="-".join(map(_name, (value, *more))))


def _pairs(row):
    return set(combinations(enumerate(map(repr, row)), 2))


def _name(value):
    if isinstance(value, tuple):
        return "x".join(map(_name, value))
    return str(getattr(value, "__name__", value))
