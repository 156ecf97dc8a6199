"""What calibration stores of an attention module: statistics of its q, k and v, per head.

They are those of what is multiplied: after norms and rotary embeddings, without the softmax scale.
Calls with a mask are not among them, as torch computes those whatever the checkpoint says.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from quantkit.calibration.buckets import bucket_groups, targets_of
from quantkit.calibration.layer_fields import Field, check_fields
from quantkit.numerics.attention_basis import is_rank
from quantkit.numerics.attention_formats import ATTENTION_FORMATS

#: Optional fields: all of a group, or none.
SECOND = ("q_second", "k_second")
ERRORS = ("ranks", "rank_lost", "sparse_lost", "power", "held_out")
FORMATS = ("format_lost", "format_power")
#: Relative error that the float32 sums behind a mean or a second moment may have.
_SUM_ERROR = 1e-3


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """One attention module over B timestep buckets; H heads of D columns.

    A bucket without calls has zeros. Rows are counted per head, over all pictures of a batch.
    """

    #: float32 (B, H), largest |q|
    q_amax: Tensor
    #: float32 (B, H, D), smallest and largest k; with any mean, the largest |k - mean| follows
    k_low: Tensor
    k_high: Tensor
    #: the same of v
    v_low: Tensor
    v_high: Tensor
    #: float32 (B, H, D), over all rows
    q_mean: Tensor
    k_mean: Tensor
    v_mean: Tensor
    #: int64 (B,), rows of q, and of k and v, that were seen
    queries: Tensor
    keys: Tensor
    #: int64 (B,), the most that one picture had in one call
    call_queries: Tensor
    call_keys: Tensor
    #: float32 (B, H), mean over the sampled rows of q of the entropy of softmax over all keys,
    #: divided by log(keys): 0 if all is on one key, 1 if it is even; 0 for a single key
    entropy: Tensor
    #: int64 (B,), rows that were sampled: of every picture and call 32, or all, evenly spread
    rows: Tensor
    #: float32 (B, H), of self attention, mean over the sampled rows of the probability on the keys
    #: that lie at most keys // 20 places from the query in the sequence; 0 for cross attention
    locality: Tensor
    #: int64 (B,), sampled rows that it is the mean of; 0 for cross attention
    local_rows: Tensor
    #: float32 (H, D, D), E[q q'] and E[k k'] over all buckets and rows; None where a norm or a
    #: rotary embedding stands between projection and product: no basis can pass through those
    q_second: Tensor | None = None
    k_second: Tensor | None = None
    #: int64 (R,), ascending: first columns whose error was measured; None, like all below, but for
    #: the modules that ``rotate`` gave a basis
    ranks: Tensor | None = None
    #: float64 (R, H), sum of squares that outputs lose with so many columns of q and k, over the
    #: sampled rows of prompts that the basis was not made from
    rank_lost: Tensor | None = None
    #: float64 (1, H), the same with the largest two of every four columns of each key; (0, H) where
    #: columns are no multiple of four
    sparse_lost: Tensor | None = None
    #: float64 (H,), sum of squares of these outputs
    power: Tensor | None = None
    #: int64 (1,), how many prompts these were
    held_out: Tensor | None = None
    #: float64 (F, H), sum of squares that outputs lose in each of ATTENTION_FORMATS, with scales of
    #: each call's own numbers, over the sampled rows; None, like the next, but where a recipe asked
    format_lost: Tensor | None = None
    #: float64 (H,), sum of squares of these outputs
    format_power: Tensor | None = None

    @property
    def heads(self) -> int:
        """How many heads."""
        return self.k_mean.shape[1]

    @property
    def columns(self) -> int:
        """The size of a head."""
        return self.k_mean.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """Return every field that is there, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def errors(self) -> dict[str, Tensor] | None:
        """Return what fewer columns lose, by field; None where it was not measured."""
        found = self.tensors()
        return {name: found[name] for name in ERRORS} if ERRORS[0] in found else None

    def format_errors(self) -> dict[str, float] | None:
        """Return the relative error of the output by name of the format; None: not measured."""
        if self.format_lost is None or self.format_power is None:
            return None
        total = float(self.format_power.sum())
        lost = self.format_lost.sum(dim=1).tolist()
        # A format that came later was not measured.
        rows = zip(ATTENTION_FORMATS, lost, strict=False)
        return {row.name: math.sqrt(one / total) if total else 0.0 for row, one in rows}

    def pooled(self) -> "AttentionStatistics":
        """Return the statistics of all buckets as one (B = 1)."""
        return self.regrouped([0] * len(self.queries))

    def rebucketed(self, stored: Sequence[float], wanted: Sequence[float]) -> "AttentionStatistics":
        """Return the statistics per bucket of ``wanted`` edges, some of the ``stored`` ones."""
        return self.regrouped(targets_of(stored, wanted))

    def regrouped(self, targets: Sequence[int]) -> "AttentionStatistics":
        """Return the statistics with bucket b poured into bucket ``targets[b]``; all is exact."""
        poured: dict[str, list[Tensor]] = {name: [] for name in _POURED}
        for group in bucket_groups(targets):
            seen = group[self.queries[group] > 0]
            for name, pour in _POURED.items():
                poured[name].append(pour(self, name, seen if len(seen) else group[:1]))
        return replace(self, **{name: torch.stack(found) for name, found in poured.items()})


def largest_about(low: Tensor, high: Tensor, mean: Tensor) -> Tensor:
    """Return the largest |x - mean| of values between ``low`` and ``high``, both of which occur."""
    return torch.maximum(high - mean, mean - low)


#: Returns a field of some buckets as one, from the statistics, the field and the buckets.
_Pour = Callable[[AttentionStatistics, str, Tensor], Tensor]


def _sum(statistics: AttentionStatistics, name: str, group: Tensor) -> Tensor:
    found: Tensor = getattr(statistics, name)[group].sum(dim=0)
    return found


def _largest(statistics: AttentionStatistics, name: str, group: Tensor) -> Tensor:
    found: Tensor = getattr(statistics, name)[group].amax(dim=0)
    return found


def _smallest(statistics: AttentionStatistics, name: str, group: Tensor) -> Tensor:
    found: Tensor = getattr(statistics, name)[group].amin(dim=0)
    return found


def _mean_over(count: str) -> _Pour:
    """Return what pours means, each bucket weighing as much as it has of ``count``."""

    def pour(statistics: AttentionStatistics, name: str, group: Tensor) -> Tensor:
        values: Tensor = getattr(statistics, name)[group].double()
        weights: Tensor = getattr(statistics, count)[group].double()
        total = (weights.reshape(-1, *[1] * (values.ndim - 1)) * values).sum(dim=0)
        return (total / weights.sum().clamp(min=1)).float()

    return pour


#: How buckets are poured together, by field.
_POURED: dict[str, _Pour] = {
    "q_amax": _largest,
    "k_low": _smallest,
    "k_high": _largest,
    "v_low": _smallest,
    "v_high": _largest,
    "q_mean": _mean_over("queries"),
    "k_mean": _mean_over("keys"),
    "v_mean": _mean_over("keys"),
    "queries": _sum,
    "keys": _sum,
    "call_queries": _largest,
    "call_keys": _largest,
    "entropy": _mean_over("rows"),
    "rows": _sum,
    "locality": _mean_over("local_rows"),
    "local_rows": _sum,
}


def merge_attention(first: AttentionStatistics, second: AttentionStatistics) -> AttentionStatistics:
    """Return the statistics of both runs, which have the same buckets, heads and columns."""
    parts = (first, second)
    both = {name: torch.cat([getattr(part, name) for part in parts]) for name in _POURED}
    poured = AttentionStatistics(**both).regrouped(list(range(len(first.queries))) * 2)
    return replace(
        poured,
        q_second=_merged_second([(part.q_second, part.queries) for part in parts]),
        k_second=_merged_second([(part.k_second, part.keys) for part in parts]),
        **_merged_errors(first, second),
        **_merged_formats(first, second),
    )


def _merged_formats(first: AttentionStatistics, second: AttentionStatistics) -> dict[str, Tensor]:
    """Return the errors of formats over both; none where one has none, or other formats."""
    one, two = (part.tensors() for part in (first, second))
    shapes = {part["format_lost"].shape if "format_lost" in part else None for part in (one, two)}
    if len(shapes) > 1 or None in shapes:
        return {}
    return {name: one[name] + two[name] for name in FORMATS}


def _merged_errors(first: AttentionStatistics, second: AttentionStatistics) -> dict[str, Tensor]:
    """Return the errors over the prompts of both; none where one has none, or others."""
    one, two = (part.errors() for part in (first, second))
    if one is None or two is None or not torch.equal(one["ranks"], two["ranks"]):
        return {}
    summed = {name: one[name] + two[name] for name in ERRORS}
    return {**summed, "ranks": one["ranks"]}


def _merged_second(parts: Sequence[tuple[Tensor | None, Tensor]]) -> Tensor | None:
    """Return second moments over all rows, from those of parts and their counts by bucket."""
    total = torch.zeros((), dtype=torch.float64)
    for second, count in parts:
        if second is None:
            return None
        total = total + second.double() * count.sum()
    rows = sum(int(count.sum()) for _, count in parts)
    return (total / max(rows, 1)).float()


#: Of ``AttentionStatistics``; axes: B buckets, H heads, D columns, R ranks, S 2:4 or nothing,
#: F formats.
STATISTICS = {
    "q_amax": Field(torch.float32, "BH"),
    "k_low": Field(torch.float32, "BHD", signed=True),
    "k_high": Field(torch.float32, "BHD", signed=True),
    "v_low": Field(torch.float32, "BHD", signed=True),
    "v_high": Field(torch.float32, "BHD", signed=True),
    "q_mean": Field(torch.float32, "BHD", signed=True),
    "k_mean": Field(torch.float32, "BHD", signed=True),
    "v_mean": Field(torch.float32, "BHD", signed=True),
    "queries": Field(torch.int64, "B"),
    "keys": Field(torch.int64, "B"),
    "call_queries": Field(torch.int64, "B"),
    "call_keys": Field(torch.int64, "B"),
    "entropy": Field(torch.float32, "BH"),
    "rows": Field(torch.int64, "B"),
    "locality": Field(torch.float32, "BH"),
    "local_rows": Field(torch.int64, "B"),
    "q_second": Field(torch.float32, "HDD", signed=True),
    "k_second": Field(torch.float32, "HDD", signed=True),
    "ranks": Field(torch.int64, "R"),
    "rank_lost": Field(torch.float64, "RH"),
    "sparse_lost": Field(torch.float64, "SH"),
    "power": Field(torch.float64, "H"),
    "held_out": Field(torch.int64, "1"),
    "format_lost": Field(torch.float64, "FH"),
    "format_power": Field(torch.float64, "H"),
}


def check_attention(where: str, tensors: Mapping[str, Tensor], buckets: int) -> None:
    """Hold the tensors of one module against ``AttentionStatistics``.

    Args:
        where: what messages call the module.
        tensors: by the name of the field.
        buckets: timestep buckets of the calibration.

    Raises:
        LookupError, ValueError: a field that is missing or unknown, or of a wrong dtype, shape or
            value.
    """
    groups = (SECOND, ERRORS, FORMATS)
    absent = {name for group in groups if not set(group) & set(tensors) for name in group}
    wanted = {name: field for name, field in STATISTICS.items() if name not in absent}
    heads, columns = tensors["k_mean"].shape[1:]
    sizes = {"B": buckets, "H": heads, "D": columns, "1": 1}
    sizes |= {"R": tensors["ranks"].numel() if "ranks" in tensors else 0}
    sizes |= {"S": len(tensors["sparse_lost"]) if "sparse_lost" in tensors else 0}
    sizes |= {"F": len(tensors["format_lost"]) if "format_lost" in tensors else 0}
    if sizes["F"] > len(ATTENTION_FORMATS):
        raise ValueError(
            f"{where}/format_lost: {sizes['F']} formats, wanted at most {len(ATTENTION_FORMATS)}; "
            "upgrade quantkit"
        )
    check_fields(where, tensors, wanted, sizes)
    _check_ranges(where, tensors)
    _check_counts(where, tensors)
    for name in sorted(set(SECOND) & set(tensors)):
        _check_second(f"{where}/{name}", tensors[name])
    if "ranks" in tensors:
        _check_errors(where, tensors, columns)


def _check_errors(where: str, tensors: Mapping[str, Tensor], columns: int) -> None:
    ranks = tensors["ranks"].tolist()
    if ranks != sorted(set(ranks)) or not all(is_rank(r) and r < columns for r in ranks):
        raise ValueError(
            f"{where}/ranks: {ranks}, wanted ascending multiples of 16 below {columns}"
        )
    if len(tensors["sparse_lost"]) > 1:
        raise ValueError(f"{where}/sparse_lost: {len(tensors['sparse_lost'])} rows, wanted 0 or 1")


def _check_ranges(where: str, tensors: Mapping[str, Tensor]) -> None:
    for name in ("entropy", "locality"):
        if bool((tensors[name] > 1).any()):
            raise ValueError(f"{where}/{name}: above 1")
    for name in ("k", "v"):
        low, high, mean = (tensors[f"{name}_{what}"] for what in ("low", "high", "mean"))
        room = _SUM_ERROR * torch.maximum(low.abs(), high.abs())
        if bool(((mean < low - room) | (mean > high + room)).any()):
            raise ValueError(f"{where}/{name}_mean: not between {name}_low and {name}_high")
    amax = tensors["q_amax"].unsqueeze(2)
    if bool((tensors["q_mean"].abs() > amax * (1 + _SUM_ERROR)).any()):
        raise ValueError(f"{where}/q_mean: larger than q_amax")


def _check_counts(where: str, tensors: Mapping[str, Tensor]) -> None:
    for fewer, more in (
        ("rows", "queries"),
        ("local_rows", "rows"),
        ("call_queries", "queries"),
        ("call_keys", "keys"),
    ):
        if bool((tensors[fewer] > tensors[more]).any()):
            raise ValueError(f"{where}/{fewer}: more than {more}")


def _check_second(where: str, second: Tensor) -> None:
    power = second.diagonal(dim1=1, dim2=2)
    if bool((power < 0).any()):
        raise ValueError(f"{where}: below 0 on its diagonal")
    size = power.sqrt()
    room = _SUM_ERROR * size.unsqueeze(2) * size.unsqueeze(1) + torch.finfo(second.dtype).tiny
    if bool(((second - second.transpose(1, 2)).abs() > room).any()):
        raise ValueError(f"{where}: not symmetric")
