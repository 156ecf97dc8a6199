"""Comparisons of answers that may differ by rounding, and when values of a step are let go."""

import pytest
import torch

from quantkit.fusion.checking import is_near
from quantkit.fusion.trace import trace
from quantkit.pipelines.recorded_step import agree

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("found", "expected", "near"),
    [
        ([1.0, 100.0], [2.9, 100.0], True),
        ([1.0, 100.0], [3.1, 100.0], False),
        ([1.0, INF, -INF, NAN], [1.0, INF, -INF, NAN], True),
        # An infinity is no largest number that others are held to.
        ([1.0, INF], [1.1, INF], False),
        ([1.0, -INF], [1.0, INF], False),
        ([1.0, 6e4], [1.0, INF], False),
        ([1.0, NAN], [1.0, 1.0], False),
        ([0.0], [1e-30], False),
        ([], [], True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_answers_are_near_by_their_largest_finite_number(found, expected, near, dtype):
    found, expected = (torch.tensor(values).to(dtype) for values in (found, expected))
    assert is_near(found, expected) is near
    assert agree([found, 1], [expected, 1]) is near


def test_integers_are_equal():
    large = torch.tensor([1, 1000])
    assert is_near(large, large.clone())
    assert not is_near(large, torch.tensor([2, 1000]))


def test_values_are_let_go_behind_their_last_use():
    weight, x = torch.ones(3), torch.ones(3)

    def step():
        _unread = x - 1
        return (x * 2 + weight) * 3

    program, _ = trace(step, [x])
    unread, doubled, total, tripled = program.calls
    alone = program.last_uses([(call,) for call in program.calls])
    # The answer stays, and what the step is given.
    assert alone == {0: (unread.result,), 2: (doubled.result,), 3: (total.result,)}
    more = program.last_uses([(unread,), (doubled,), (total,), (tripled, doubled)])
    assert {place: {*values} for place, values in more.items()} == {
        0: {unread.result},
        3: {doubled.result, total.result},
    }
