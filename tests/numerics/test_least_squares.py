"""Least squares under a mask against numpy and scipy, with and without a bias."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import torch

from quantkit.numerics.least_squares import Equations, EquationSums, solve_rows
from quantkit.numerics.masks import TWO_OF_FOUR, choose_mask

K, N, PAIRS = 12, 5, 400


def seeded(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pairs():
    """Inputs (K, T) with a mean, and targets (N, T) that they nearly make."""
    x = seeded(K, PAIRS, seed=0) * torch.logspace(-1, 1, K).unsqueeze(1) + 0.7
    y = seeded(N, K, seed=1) @ x + 3 + 0.1 * seeded(N, PAIRS, seed=2)
    return x, y


def equations_of(pairs, *, bias):
    x, y = pairs
    sums = EquationSums(K, N, torch.device("cpu"))
    for first in range(0, PAIRS, 150):
        sums.add(x[:, first : first + 150], y[:, first : first + 150])
    return sums.equations(bias=bias)


def centred(pairs, *, bias):
    x, y = (t.double().numpy() for t in pairs)
    return (x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)) if bias else (x, y)


both = pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])


@both
def test_sums_are_the_means_over_the_pairs(pairs, bias):
    found = equations_of(pairs, bias=bias)
    x, y = centred(pairs, bias=bias)
    np.testing.assert_allclose(found.moment, x @ x.T / PAIRS, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.cross, y @ x.T / PAIRS, rtol=1e-3, atol=1e-3)
    assert found.power == pytest.approx((y**2).sum() / PAIRS, rel=1e-5)
    if bias:
        for mean, values in zip(found.means, pairs, strict=True):
            torch.testing.assert_close(mean, values.mean(dim=1), rtol=1e-5, atol=1e-5)
    else:
        assert found.means is None


@both
def test_the_error_is_the_share_that_is_missed(pairs, bias):
    equations, rows = equations_of(pairs, bias=bias), seeded(N, K, seed=3)
    x, y = centred(pairs, bias=bias)
    missed = ((rows.double().numpy() @ x - y) ** 2).sum() / (y**2).sum()
    assert equations.error(rows) == pytest.approx(missed, rel=1e-4)
    assert equations.error(torch.zeros(N, K)) == pytest.approx(1.0)


def test_the_best_bias_takes_the_means_up(pairs):
    x, y = pairs
    rows = seeded(N, K, seed=3)
    bias = equations_of(pairs, bias=True).bias(rows)
    left = y - rows @ x - bias.unsqueeze(1)
    assert float(left.mean(dim=1).abs().max()) < 1e-4
    assert equations_of(pairs, bias=False).bias(rows) is None


def test_an_error_is_never_below_zero_and_nothing_has_none():
    one = torch.eye(2)
    assert Equations(one, one * 2, 1.0, None).error(one * 2) == 0.0
    assert Equations(one, one, 0.0, None).error(one) == 0.0
    assert Equations(one, one * 0, 0.5, None).error(one) == pytest.approx(5.0)


@both
@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 3.0])
def test_kept_weights_are_scipys(pairs, bias, ridge):
    equations, start = equations_of(pairs, bias=bias), seeded(N, K, seed=4)
    mask = choose_mask(start.abs(), TWO_OF_FOUR)
    found = solve_rows(equations, start, mask, ridge=ridge, steps=400)
    assert not found[~mask].any()
    moment, cross = equations.moment.double().numpy(), equations.cross.double().numpy()
    pull = ridge * moment.diagonal().mean()
    for row, kept, begin, target in zip(found, mask.numpy(), start.double(), cross, strict=True):
        square = moment[np.ix_(kept, kept)] + pull * np.eye(kept.sum())
        wanted = scipy.linalg.solve(square, target[kept] + pull * begin.numpy()[kept])
        np.testing.assert_allclose(row[torch.from_numpy(kept)], wanted, rtol=2e-2, atol=2e-3)


def test_every_step_lowers_the_error_and_none_changes_nothing(pairs):
    equations, start = equations_of(pairs, bias=True), seeded(N, K, seed=4)
    mask = choose_mask(start.abs(), TWO_OF_FOUR)
    found = [solve_rows(equations, start, mask, ridge=1e-6, steps=n) for n in range(4)]
    assert torch.equal(found[0], start * mask)
    errors = [equations.error(rows) for rows in found]
    assert all(after < before for before, after in pairwise(errors))


def test_a_solved_row_stands_still():
    start = seeded(3, 4, seed=5)
    equations = Equations(torch.eye(4), start.clone(), 1.0, None)
    mask = torch.ones(3, 4, dtype=torch.bool)
    assert torch.equal(solve_rows(equations, start, mask, ridge=1e-3, steps=50), start)
    # Inputs of no power say nothing, and the ridge holds the weights where they are.
    dead = Equations(torch.zeros(4, 4), torch.zeros(3, 4), 0.0, None)
    assert torch.equal(solve_rows(dead, start, mask, ridge=1e-3, steps=50), start)
