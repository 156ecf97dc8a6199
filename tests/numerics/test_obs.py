"""OBS on rows: brute force over masks, least squares as the bound, grids, dead columns, orders."""

from itertools import chain, combinations, pairwise, product

import numpy as np
import pytest
import scipy.linalg
import torch

from quantkit.numerics.formats import FORMATS
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.masks import MASKS, Pattern, choose_mask
from quantkit.numerics.obs import (
    Grid,
    _square_root,
    factorize,
    falling_power,
    output_error,
    refit_rows,
    settle_rows,
)
from quantkit.numerics.scales import amax_scale, dequantize, quantize

TWO_OF_FOUR = Pattern(2, 4)
NO_DAMPING = 1e-9


def correlated(k, *, seed=0, rows=400, rank=None):
    """Return the second moment of correlated inputs with a mean, (k, k) float32."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(rank or k, k, generator=g) * torch.logspace(-1, 0.5, k)
    x = torch.randn(rows, rank or k, generator=g) @ mixing + 0.3
    return (x.T @ x) / rows


def nearly_constant(k, *, mean=30.0, spread=1e-3, rows=4000):
    """Return the covariance of inputs that hardly vary as float32 sums give it: indefinite."""
    g = torch.Generator().manual_seed(2)
    x = mean + spread * torch.randn(rows, k, generator=g)
    middle = x.mean(dim=0)
    return (x.T @ x / rows).addr(middle, middle, alpha=-1)


def weights(n, k, seed=1):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def least_squares(row, mask, moment, ridge=0.0):
    """Return the kept weights of least error by scipy, given the mask."""
    h = moment.double().numpy() + ridge * np.eye(len(row))
    keep = mask.numpy()
    out = np.zeros(len(row))
    out[keep] = scipy.linalg.solve(
        h[np.ix_(keep, keep)], h[keep] @ row.double().numpy(), assume_a="pos"
    )
    return torch.from_numpy(out)


def error_of(values, rows, moment):
    d = (values - rows).double()
    return float(torch.einsum("nk,kl,nl->", d, moment.double(), d))


def every_mask(k, pattern):
    groups = [
        [i in kept for i in range(pattern.m)] for kept in combinations(range(pattern.m), pattern.n)
    ]
    for choice in product(groups, repeat=k // pattern.m):
        yield torch.tensor([*chain.from_iterable(choice)])


@pytest.mark.parametrize("ordered", [False, True])
def test_the_factor_is_that_of_the_damped_moment(ordered):
    moment = correlated(24)
    order = falling_power(moment) if ordered else None
    factor = factorize(moment, damping=0.05, order=order)
    lower, pivots = factor.lower.double().numpy(), factor.pivots.double().numpy()
    assert np.array_equal(np.triu(lower), np.eye(24))
    ridge = 0.05 * float(moment.diagonal().mean())
    damped = (moment.double() + ridge * torch.eye(24))[factor.order][:, factor.order].numpy()
    np.testing.assert_allclose(lower.T @ (pivots[:, None] * lower), damped, rtol=1e-5, atol=1e-6)
    # A pivot is what scipy says of the inverse, once the columns before are settled.
    for first in (0, 7, 23):
        free = scipy.linalg.inv(damped[first:, first:])
        assert pivots[first] == pytest.approx(1 / free[0, 0], rel=1e-5)


def brain_surgery(row, moment, *, damping):
    """Return SparseGPT by the letter: one row, the inverse taken anew for every column, float64."""
    k = len(row)
    work = moment.double().numpy() + damping * float(moment.diagonal().mean()) * np.eye(k)
    row, mask = row.double().numpy().copy(), np.ones(k, dtype=bool)
    for j in range(k):
        if j % 4 == 0:
            factor = np.linalg.cholesky(np.linalg.inv(work[j:, j:])).T
            scores = (row[j : j + 4] / factor.diagonal()[:4]) ** 2
            mask[j : j + 4] = scores >= np.sort(scores)[2]
        inverse = np.linalg.inv(work[j:, j:])
        error = 0.0 if mask[j] else row[j] / inverse[0, 0]
        row[j:] -= error * inverse[0]
        row[j] *= mask[j]
    return torch.from_numpy(row), torch.from_numpy(mask)


def test_rounding_that_makes_a_covariance_indefinite_is_damped_away():
    moment = nearly_constant(64)
    assert float(torch.linalg.eigvalsh(moment.double())[0]) < -1e-3 * float(
        moment.diagonal().mean()
    )
    factor = factorize(moment, damping=1e-3)
    assert bool((factor.pivots > 0).all())
    assert bool(factor.lower.isfinite().all())
    rows = weights(8, 64)
    values, mask = settle_rows(rows, factor, mask=TWO_OF_FOUR)
    assert bool(values.isfinite().all())
    # What is made up for stays of the size of what was dropped.
    assert float(values.norm()) < 2 * float(rows.norm())
    assert bool((mask.reshape(8, 16, 4).sum(dim=2) == 2).all())


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_damping_begins_at_a_billionth_of_the_largest_power(size):
    """Where nothing was asked for and the moment is not positive, as little as helps is added."""
    moment = size * torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-12]], dtype=torch.float64)
    root = _square_root(moment.clone(), 0.0)
    added = (root @ root.T - moment).diagonal() / size
    torch.testing.assert_close(added, torch.full_like(added, 1e-9), rtol=1e-3, atol=0)


@pytest.mark.parametrize("k", [4, 8, 36])
def test_settling_by_halves_is_surgery_one_column_at_a_time(k):
    moment, rows = correlated(k), weights(6, k)
    values, mask = settle_rows(rows, factorize(moment, damping=0.02), mask=TWO_OF_FOUR)
    for row, value, kept in zip(rows, values, mask, strict=True):
        wanted, pattern = brain_surgery(row, moment, damping=0.02)
        assert torch.equal(kept, pattern)
        torch.testing.assert_close(value.double(), wanted, rtol=1e-4, atol=1e-4)


def test_falling_power_orders_columns_and_keeps_groups_together():
    moment = torch.diag(torch.tensor([1.0, 5, 2, 2, 9, 0, 0, 1]))
    assert falling_power(moment).tolist() == [4, 1, 2, 3, 0, 7, 5, 6]
    assert falling_power(moment, 4).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert falling_power(moment, 2).tolist() == [4, 5, 0, 1, 2, 3, 6, 7]


def test_a_diagonal_moment_makes_sparsegpt_wanda():
    power = torch.rand(32, generator=torch.Generator().manual_seed(3)) + 0.1
    rows = weights(16, 32)
    factor = factorize(torch.diag(power), damping=NO_DAMPING)
    values, mask = settle_rows(rows, factor, mask=TWO_OF_FOUR)
    assert torch.equal(mask, choose_mask(MASKS["wanda"](rows, power), TWO_OF_FOUR))
    torch.testing.assert_close(values, rows * mask)


def test_no_mask_is_better_than_the_best_of_all_and_the_chosen_one_is_near_it():
    ratios, places = [], []
    for seed in range(8):
        moment, row = correlated(12, seed=seed), weights(1, 12, seed + 50)
        every = [
            error_of(least_squares(row[0], mask, moment)[None], row, moment)
            for mask in every_mask(12, TWO_OF_FOUR)
        ]
        values, mask = settle_rows(row, factorize(moment, damping=NO_DAMPING), mask=TWO_OF_FOUR)
        values = refit_rows(row, values, mask, moment, damping=NO_DAMPING, steps=60)
        found = error_of(values, row, moment)
        assert found >= min(every) * (1 - 1e-3)
        ratios.append(found / sorted(every)[len(every) // 2])
        places.append(sum(error < found * (1 - 1e-3) for error in every) / len(every))
    # It is greedy: not the best of all 216, but among the first tenth of them on average.
    assert np.mean(places) < 0.1
    assert np.mean(ratios) < 0.3


@pytest.mark.parametrize("rank", [None, 10], ids=["full", "low-rank"])
def test_refit_is_scipys_least_squares_given_the_mask(rank):
    moment, rows = correlated(40, rank=rank), weights(6, 40)
    mask = choose_mask(rows.abs(), TWO_OF_FOUR)
    damping = 1e-2
    values = refit_rows(rows, rows * mask, mask, moment, damping=damping, steps=300)
    ridge = damping * float(moment.diagonal().mean())
    for row, kept, value in zip(rows, mask, values, strict=True):
        wide = moment.double() + ridge * torch.eye(40)
        best = error_of(least_squares(row, kept, moment, ridge)[None], row[None], wide)
        assert error_of(value[None], row[None], wide) == pytest.approx(best, rel=1e-3)
    assert not values[~mask].any()


def test_columns_that_do_not_correlate_are_refitted_in_one_step():
    """The preconditioner is the diagonal: of a diagonal matrix it is the inverse. One is dead."""
    moment = torch.logspace(-3, 3, 16).index_fill(0, torch.tensor([5]), 0.0).diag()
    rows = weights(3, 16)
    mask = choose_mask(rows.abs(), TWO_OF_FOUR)
    found = refit_rows(rows, torch.zeros_like(rows), mask, moment, damping=1e-2, steps=1)
    torch.testing.assert_close(found, rows * mask)


def test_every_step_of_the_refit_lowers_the_error():
    moment, rows = correlated(64), weights(8, 64)
    mask = choose_mask(rows.abs(), TWO_OF_FOUR)
    start, _ = settle_rows(rows, factorize(moment, damping=1e-2), mask=mask)
    errors = [
        error_of(refit_rows(rows, start, mask, moment, damping=1e-6, steps=n), rows, moment)
        for n in (0, 1, 3, 10, 30)
    ]
    assert errors[0] == pytest.approx(error_of(start, rows, moment))
    assert all(b < a for a, b in pairwise(errors))


def test_a_solved_refit_stops_before_numbers_turn_subnormal():
    # Uncorrelated inputs are solved in one step; residuals then fell by a factor a step for good.
    rows = weights(8, 64)
    mask = choose_mask(rows.abs(), TWO_OF_FOUR)
    moment = torch.diag(torch.linspace(0.5, 2, 64)) + 1e-3
    long, short = (
        refit_rows(rows, rows * mask, mask, moment, damping=1e-6, steps=n) for n in (5000, 20)
    )
    torch.testing.assert_close(long, short, rtol=1e-6, atol=1e-6)
    best = torch.stack([least_squares(*pair, moment) for pair in zip(rows, mask, strict=True)])
    torch.testing.assert_close(long.double(), best, rtol=1e-4, atol=1e-5)


def test_sparsegpt_beats_wanda_beats_magnitude():
    errors = {}
    moment, rows = correlated(128), weights(64, 128)
    power = moment.diagonal()
    for name, scores in MASKS.items():
        errors[name] = error_of(rows * choose_mask(scores(rows, power), TWO_OF_FOUR), rows, moment)
    values, mask = settle_rows(rows, factorize(moment, damping=1e-3), mask=TWO_OF_FOUR)
    errors["sparsegpt"] = error_of(values, rows, moment)
    refitted = refit_rows(rows, values, mask, moment, damping=1e-3, steps=30)
    assert error_of(refitted, rows, moment) < errors["sparsegpt"]
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


def test_a_given_mask_is_kept_and_gives_what_choosing_it_gave():
    moment, rows = correlated(64), weights(8, 64)
    factor = factorize(moment, damping=1e-2)
    values, mask = settle_rows(rows, factor, mask=TWO_OF_FOUR)
    again, kept = settle_rows(rows, factor, mask=mask)
    assert torch.equal(again, values)
    assert torch.equal(kept, mask)
    assert torch.equal(values != 0, mask)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "3:16", "1:2"])
@pytest.mark.parametrize("ordered", [False, True])
def test_any_pattern_keeps_n_of_every_m(pattern, ordered):
    n, m = map(int, pattern.split(":"))
    moment, rows = correlated(48), weights(5, 48)
    order = falling_power(moment, m) if ordered else None
    _, mask = settle_rows(rows, factorize(moment, damping=0.01, order=order), mask=Pattern(n, m))
    assert bool((mask.reshape(-1, m).sum(1) == n).all())


def test_an_order_that_takes_groups_apart_is_our_own_mistake():
    moment = correlated(8)
    factor = factorize(moment, damping=0.01, order=torch.tensor([0, 2, 1, 3, 4, 5, 6, 7]))
    with pytest.raises(AssertionError, match="takes groups apart"):
        settle_rows(weights(2, 8), factor, mask=TWO_OF_FOUR)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerChannel(), PerGroup(16)], ids=["tensor", "channel", "group"]
)
def test_gptq_lands_on_the_grid_and_beats_the_nearest_code(fmt, granularity):
    moment, rows = correlated(96), weights(32, 96)
    for rule in ("amax", "mse"):
        scale = choose_scale(rows, fmt, granularity, rule)
        wide = dequantize(torch.ones_like(rows).to(fmt.torch_dtype), scale, granularity)
        factor = factorize(moment, damping=1e-4, order=falling_power(moment))
        values, mask = settle_rows(rows, factor, grid=Grid(fmt, wide))
        codes = quantize(values, scale, fmt, granularity)
        assert torch.equal(dequantize(codes, scale, granularity), values)
        nearest = dequantize(quantize(rows, scale, fmt, granularity), scale, granularity)
        assert error_of(values, rows, moment) < 0.7 * error_of(nearest, rows, moment)
        assert bool(mask.all())


def test_uncorrelated_inputs_leave_the_nearest_code():
    rows, power = weights(8, 32), torch.rand(32, generator=torch.Generator().manual_seed(9)) + 0.5
    fmt = FORMATS["e4m3fn"]
    scale = amax_scale(rows, fmt, PerChannel())
    factor = factorize(
        torch.diag(power), damping=NO_DAMPING, order=falling_power(torch.diag(power))
    )
    values, _ = settle_rows(rows, factor, grid=Grid(fmt, scale.reshape(-1, 1)))
    nearest = dequantize(quantize(rows, scale, fmt, PerChannel()), scale, PerChannel())
    assert torch.equal(values, nearest)


def test_sparse_weights_land_on_the_grid_inside_their_mask():
    moment, rows = correlated(64), weights(16, 64)
    fmt = FORMATS["e4m3fn"]
    start, mask = settle_rows(rows, factorize(moment, damping=1e-2), mask=TWO_OF_FOUR)
    free = refit_rows(rows, start, mask, moment, damping=1e-3, steps=40)
    scale = amax_scale(free, fmt, PerChannel()).reshape(-1, 1)
    factor = factorize(moment, damping=1e-3, order=falling_power(moment))
    values, kept = settle_rows(free, factor, mask=mask, grid=Grid(fmt, scale))
    nearest = (free / scale).to(fmt.torch_dtype).float() * scale
    assert torch.equal(kept, mask)
    assert not values[~mask].any()
    assert error_of(values, rows, moment) < error_of(nearest, rows, moment)


def test_dead_inputs_neither_spread_nor_take_errors():
    moment, rows = correlated(16), weights(4, 16)
    moment[3] = 0
    moment[:, 3] = 0
    values, mask = settle_rows(rows, factorize(moment, damping=1e-2), mask=TWO_OF_FOUR)
    # Three live weights share the group: two of them are kept, whatever the dead one weighs.
    assert not mask[:, 3].any()
    live = [i for i in range(16) if i != 3]
    loud = rows.clone()
    loud[:, 3] = 1e6
    again, _ = settle_rows(loud, factorize(moment, damping=1e-2), mask=TWO_OF_FOUR)
    torch.testing.assert_close(again[:, live], values[:, live])
    refitted = refit_rows(loud, again, mask, moment, damping=1e-2, steps=20)
    assert bool(refitted.isfinite().all())


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_and_zero_rows(rows):
    moment = correlated(8)
    values, mask = settle_rows(
        torch.zeros(rows, 8), factorize(moment, damping=0.01), mask=TWO_OF_FOUR
    )
    assert values.shape == (rows, 8)
    assert not values.any()
    assert bool((mask.reshape(rows, 2, 4).sum(2) == 2).all())


def test_an_all_zero_moment_says_nothing_and_breaks_nothing():
    rows = weights(2, 8)
    values, _ = settle_rows(rows, factorize(torch.zeros(8, 8), damping=0.01), mask=TWO_OF_FOUR)
    assert bool(values.isfinite().all())


def test_blocks_of_rows_give_the_same_rows():
    moment, rows = correlated(80), weights(9, 80)
    factor = factorize(moment, damping=1e-2)
    whole, _ = settle_rows(rows, factor, mask=TWO_OF_FOUR)
    parts = [settle_rows(part, factor, mask=TWO_OF_FOUR)[0] for part in rows.split(4)]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_output_error_is_the_trace():
    moment, change = correlated(12), weights(5, 12)
    wanted = float(torch.trace(change.double() @ moment.double() @ change.double().T))
    assert output_error(change, moment) == pytest.approx(wanted, rel=1e-5)
