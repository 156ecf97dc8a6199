"""Which columns stand together in the groups of an n:m mask: a search over permutations.

A mask keeps n of every m neighbours, so columns that are large in the same rows should not be
neighbours. Pairs of groups are taken, the columns of each pair dealt anew in the best way, until no
pair gains; then again from a disturbed start. Only whole columns move, the mask follows.

Source: Pool and Yu 2021, Channel Permutations for N:M Sparsity (NeurIPS): all splits of a pair of
stripes, greedily, and escapes from what no pair improves. They take the best of all pairs at each
step; here pairs that share no group are taken at once, which needs no table of all pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb

import torch
from torch import Generator, Tensor

from quantkit.numerics.masks import TWO_OF_FOUR, Pattern

#: Groups that are tried, times rows, in one search: 2 s on one core. Half of it gained 5 % less on
#: the demo's middle block, ten times as much 5 % more. Layers for which it is less than
#: ``_LEAST_ROUNDS`` take longer.
WORK = 2e8
_LEAST_ROUNDS = 20
#: Disturbed starts, where the work allows them.
_RESTARTS = 16
#: Above this many ways to split a pair of groups, only exchanges of one column are tried: 4:8 has
#: 6435 ways and 64 exchanges.
_MOST_SPLITS = 100
#: Rows times pairs at a time, which take 224 bytes each: few for a cache, many for a GPU.
_ELEMENTS = {"cpu": 1 << 13, "cuda": 1 << 20}
#: A gain below this share of what is kept is rounding: float32 sums over thousands of rows.
_LEAST_GAIN = 1e-5


def search_permutation(
    power: Tensor, pattern: Pattern, *, block: int, seed: int = 0, work: float = WORK
) -> Tensor:
    """Return an order of the columns in which an n:m mask keeps more.

    Args:
        power: (N, K) float32, finite, >= 0: what is lost with each weight.
        pattern: n:m.
        block: columns stay inside blocks of so many; a multiple of m that divides K.
        seed: of the order in which pairs are met, and of the starts.
        work: bounds the time.

    Returns:
        int64 (K,) on the CPU: column ``order[i]`` goes to place i. In no block is less kept than in
        the order as it was; where nothing is gained, it is that order. The channels of a group
        ascend, and so do the first channels of a block's groups.
    """
    n, k = power.shape
    assert k % block == 0, f"K {k} in blocks of {block}"
    assert block % pattern.m == 0, f"blocks of {block} in groups of {pattern.m}"
    search = _Search(power.t().contiguous(), pattern, Generator().manual_seed(seed))
    start = torch.arange(k).reshape(k // block, block // pattern.m, pattern.m)
    if n == 0 or start.shape[1] == 1:
        return start.reshape(-1)
    rounds = max(_LEAST_ROUNDS, int(work // search.cost(start)))
    best, kept = start, search.kept(start)
    found, rounds = search.settle(start, rounds)
    for restart in range(_RESTARTS + 1):
        gains = search.kept(found)
        better = gains > kept * (1 + _LEAST_GAIN)
        best = torch.where(better[:, None, None], found, best)
        kept = torch.where(better, gains, kept)
        if rounds <= 0 or restart == _RESTARTS:
            break
        found, rounds = search.settle(search.disturbed(best), rounds)
    return _tidied(best).reshape(-1)


def kept_share(power: Tensor, pattern: Pattern) -> float:
    """Return the share of the power that an n:m mask keeps, 1 where there is none.

    Args:
        power: (N, K), K a multiple of m.
        pattern: n:m.
    """
    total = float(power.sum(dtype=torch.float64))
    groups = power.reshape(-1, pattern.m)
    kept = groups.topk(pattern.n, dim=1).values.sum(dtype=torch.float64)
    return float(kept) / total if total else 1.0


@dataclass(frozen=True, eq=False)
class _Search:
    """What stays the same in a search; orders are int64 (blocks, groups, m)."""

    #: (K, N)
    columns: Tensor
    pattern: Pattern
    generator: Generator

    def cost(self, order: Tensor) -> int:
        """Return the work of one round."""
        blocks, groups, m = order.shape
        return blocks * (groups // 2) * self.columns.shape[1] * 2 * len(_splits(m))

    def settle(self, order: Tensor, rounds: int) -> tuple[Tensor, int]:
        """Deal pairs anew until none gains; return the order and how many rounds are left."""
        groups = order.shape[1]
        while rounds > 0:
            gained = False
            for pairs in _meetings(torch.randperm(groups, generator=self.generator)):
                if rounds <= 0:
                    break
                order, changed = self._deal(order, pairs)
                gained |= changed
                rounds -= 1
            if not gained:
                break
        return order, rounds

    def kept(self, order: Tensor) -> Tensor:
        """Return the power that is kept in each block, float64 (blocks,)."""
        blocks, groups, _ = order.shape
        sums = torch.zeros(blocks, groups, dtype=torch.float64)
        for block in range(blocks):
            columns = self.columns[order[block].to(self.columns.device)]
            largest = columns.topk(self.pattern.n, dim=1).values
            sums[block] = largest.sum(dim=(1, 2), dtype=torch.float64).cpu()
        return sums.sum(dim=1)

    def disturbed(self, order: Tensor) -> Tensor:
        """Shuffle some columns of each block: from a tenth of them to all."""
        blocks, groups, m = order.shape
        flat = order.reshape(blocks, -1).clone()
        share = float(torch.rand((), generator=self.generator)) * 0.9 + 0.1
        count = max(2, round(share * groups * m))
        for row in flat:
            places = torch.randperm(groups * m, generator=self.generator)[:count]
            row[places] = row[places[torch.randperm(count, generator=self.generator)]]
        return flat.reshape(order.shape)

    def _deal(self, order: Tensor, pairs: Tensor) -> tuple[Tensor, bool]:
        """Give each pair of groups (P, 2) its best split, in all blocks."""
        blocks, _, m = order.shape
        both = order[:, pairs].reshape(-1, 2 * m)
        kept = torch.cat([self._kept_of_splits(part) for part in torch.split(both, self._step)])
        most, choice = kept.max(dim=1)
        choice[most <= kept[:, 0] * (1 + _LEAST_GAIN)] = 0
        dealt = both.gather(1, torch.tensor(_splits(m))[choice])
        order = order.clone()
        order[:, pairs] = dealt.reshape(blocks, len(pairs), 2, m)
        return order, bool(choice.any())

    @property
    def _step(self) -> int:
        return max(1, _ELEMENTS[self.columns.device.type] // self.columns.shape[1])

    def _kept_of_splits(self, both: Tensor) -> Tensor:
        """Return what every split of every pair keeps, (P, splits) on the CPU."""
        m = self.pattern.m
        columns = self.columns[both.t().to(self.columns.device)]
        keeps = _two_of_four if self.pattern == TWO_OF_FOUR else _any_of_any
        groups = sorted({g for s in _splits(m) for g in _halves(s)})
        kept = dict(zip(groups, keeps(columns, groups, self.pattern.n), strict=True))
        splits = [[kept[half] for half in _halves(split)] for split in _splits(m)]
        return torch.stack([first + second for first, second in splits], dim=1).cpu()


_Group = tuple[int, ...]


def _two_of_four(columns: Tensor, groups: list[_Group], n: int) -> Iterator[Tensor]:
    """Yield what each group of columns (8, P, N) keeps, (P,).

    The two largest of a, b, c, d have the largest sum of two: that of a pair, or max(a, b) +
    max(c, d). Sums and maxima of two columns serve many groups.
    """
    assert n == 2
    pairs = list(combinations(range(len(columns)), 2))
    sums = {(a, b): columns[a] + columns[b] for a, b in pairs}
    larger = {(a, b): torch.maximum(columns[a], columns[b]) for a, b in pairs}
    for a, b, c, d in groups:
        crossing = larger[a, b] + larger[c, d]
        inner = torch.maximum(sums[a, b], sums[c, d])
        yield torch.maximum(crossing, inner).sum(dim=-1)


def _any_of_any(columns: Tensor, groups: list[_Group], n: int) -> Iterator[Tensor]:
    """Yield what each group of columns (2m, P, N) keeps, (P,)."""
    for group in groups:
        yield columns[list(group)].topk(n, dim=0).values.sum(dim=(0, 2))


@cache
def _splits(m: int) -> tuple[_Group, ...]:
    """Return ways to deal 2m columns to two groups, first the one that changes nothing.

    All that differ, or exchanges of one column where those are too many.
    """
    every = range(2 * m)
    if comb(2 * m, m) // 2 <= _MOST_SPLITS:
        firsts = [first for first in combinations(every, m) if first[0] == 0]
    else:
        kept = tuple(range(m))
        firsts = [kept] + [
            tuple(sorted({*kept, b} - {a})) for a in range(m) for b in range(m, 2 * m)
        ]
    return tuple((*first, *(i for i in every if i not in first)) for first in firsts)


def _halves(split: _Group) -> tuple[_Group, _Group]:
    return split[: len(split) // 2], split[len(split) // 2 :]


def _meetings(names: Tensor) -> Iterator[Tensor]:
    """Yield rounds of disjoint pairs (P, 2) in which each meets each other one once.

    The circle method of tournaments: one stays, the others move on by one place.
    """
    count = len(names)
    even = count + count % 2
    last = even - 1
    for turn in range(last):
        steps = torch.arange(1, even // 2)
        left = torch.cat([torch.tensor([last]), (turn + steps) % last])
        right = torch.cat([torch.tensor([turn]), (turn - steps) % last])
        here = (left < count) & (right < count)
        yield torch.stack([names[left[here]], names[right[here]]], dim=1)


def _tidied(order: Tensor) -> Tensor:
    """Return the order with the columns of a group and the groups of a block ascending."""
    groups = order.sort(dim=2).values
    places = groups[:, :, 0].argsort(dim=1)
    return groups.gather(1, places[:, :, None].expand_as(groups))
