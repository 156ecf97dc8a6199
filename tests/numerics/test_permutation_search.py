"""The search for a permutation, against all groupings where there are few."""

from functools import partial
from itertools import combinations

import pytest
import torch

from quantkit.numerics.masks import TWO_OF_FOUR, Pattern, choose_mask
from quantkit.numerics.permutation_search import _Search, kept_share, search_permutation
from tests.support.permutations import random_power


def best_grouping(power, m, n):
    """Return the most that any grouping keeps, by trying every one."""

    def best(columns):
        if not columns:
            return 0.0
        first, rest = columns[0], columns[1:]
        return max(
            float(power[:, [first, *others]].topk(n, dim=1).values.sum())
            + best([c for c in rest if c not in others])
            for others in combinations(rest, m - 1)
        )

    return best(list(range(power.shape[1])))


@pytest.mark.parametrize(
    ("pattern", "k"),
    [("2:4", 8), ("2:4", 12), ("1:4", 8), ("3:4", 12), ("1:2", 8), ("2:3", 9)],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_small_search_finds_the_best_of_all_groupings(pattern, k, seed):
    n, m = map(int, pattern.split(":"))
    power = random_power(5, k, seed)
    order = search_permutation(power, Pattern(n, m), block=k, work=1e6)
    kept = kept_share(power[:, order], Pattern(n, m)) * float(power.sum())
    assert kept == pytest.approx(best_grouping(power, m, n), rel=1e-5)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "1:2"])
@pytest.mark.parametrize(("n", "k", "block"), [(7, 64, 64), (3, 48, 16), (1, 40, 40), (5, 8, 8)])
def test_no_block_loses_and_no_column_leaves_its_block(pattern, n, k, block):
    pattern = Pattern(*map(int, pattern.split(":")))
    power = random_power(n, k, k)
    order = search_permutation(power, pattern, block=block, work=1e3)
    assert order.dtype == torch.int64
    for start in range(0, k, block):
        part = order[start : start + block]
        assert sorted(part.tolist()) == list(range(start, start + block))
        before = kept_share(power[:, start : start + block], pattern)
        assert kept_share(power[:, part], pattern) >= before - 1e-12


def test_a_search_gains_what_pairs_of_columns_hide():
    """Columns of equal sign in pairs of rows: together two of four are lost, apart none."""
    power = torch.zeros(2, 16)
    power[0, :8], power[1, 8:] = 1.0, 1.0
    assert kept_share(power, TWO_OF_FOUR) == 0.5
    order = search_permutation(power, TWO_OF_FOUR, block=16, work=1e5)
    assert kept_share(power[:, order], TWO_OF_FOUR) == 1.0


def test_a_search_repeats_itself_and_follows_its_seed():
    power = random_power(16, 64)
    search = partial(search_permutation, power, TWO_OF_FOUR, block=64, work=1e5)
    first = search(seed=1)
    assert torch.equal(first, search(seed=1))
    assert not torch.equal(first, search(seed=2))


def test_more_work_keeps_no_less():
    power = random_power(16, 96)
    kept = [
        kept_share(power[:, search_permutation(power, TWO_OF_FOUR, block=96, work=w)], TWO_OF_FOUR)
        for w in (0, 1e6)
    ]
    assert kept_share(power, TWO_OF_FOUR) < kept[0] < kept[1]


@pytest.mark.parametrize(
    "power",
    [torch.zeros(4, 16), torch.ones(4, 16), torch.zeros(0, 16), torch.full((4, 16), 1e-30)],
    ids=["zero", "equal", "empty", "tiny"],
)
def test_where_nothing_is_gained_nothing_moves(power):
    order = search_permutation(power, TWO_OF_FOUR, block=16)
    assert order.tolist() == list(range(16))


@pytest.mark.parametrize(("drawn", "least", "most"), [(0.0, 2, 4), (0.5, 15, 22), (1.0, 32, 40)])
def test_a_disturbance_moves_from_a_tenth_of_the_columns_to_all(monkeypatch, drawn, least, most):
    search = _Search(torch.ones(40, 1), TWO_OF_FOUR, torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(drawn))
    order = torch.arange(40).reshape(1, 10, 4)
    found = search.disturbed(order)
    assert sorted(found.flatten().tolist()) == list(range(40))
    assert least <= int((found != order).sum()) <= most


def test_of_no_power_all_is_kept():
    assert kept_share(torch.zeros(3, 8), TWO_OF_FOUR) == 1.0
    assert kept_share(torch.zeros(0, 8), TWO_OF_FOUR) == 1.0


def test_kept_share_is_that_of_the_mask():
    power = random_power(9, 32)
    kept = power[choose_mask(power, TWO_OF_FOUR)].sum() / power.sum()
    assert kept_share(power, TWO_OF_FOUR) == pytest.approx(float(kept), rel=1e-6)
