"""What calibration stores of an attention module: statistics of its q, k and v, per head.

They are those of what is multiplied: after norms and rotary embeddings, without the softmax scale.
Calls with a mask are not among them, as torch computes those whatever the checkpoint says.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_fields import Field, check_fields
from quantkit.calibration.statistics.merged_buckets import bucket_groups, targets_of
from quantkit.numerics.attention_formats import ATTENTION_FORMATS

#: Optional fields: both, or none.
FORMATS = ("format_lost", "format_power")
#: Relative error that the float32 sums of a mean may have.
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
}


def merge_attention(first: AttentionStatistics, second: AttentionStatistics) -> AttentionStatistics:
    """Return the statistics of both runs, which have the same buckets, heads and columns."""
    parts = (first, second)
    both = {name: torch.cat([getattr(part, name) for part in parts]) for name in _POURED}
    poured = AttentionStatistics(**both).regrouped(list(range(len(first.queries))) * 2)
    return replace(poured, **_merged_formats(first, second))


def _merged_formats(first: AttentionStatistics, second: AttentionStatistics) -> dict[str, Tensor]:
    """Return the errors of formats over both; none where one has none, or other formats."""
    one, two = (part.tensors() for part in (first, second))
    shapes = {part["format_lost"].shape if "format_lost" in part else None for part in (one, two)}
    if len(shapes) > 1 or None in shapes:
        return {}
    return {name: one[name] + two[name] for name in FORMATS}


#: Of ``AttentionStatistics``; axes: B buckets, H heads, D columns, F formats.
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
    absent = () if set(FORMATS) & set(tensors) else FORMATS
    wanted = {name: field for name, field in STATISTICS.items() if name not in absent}
    heads, columns = tensors["k_mean"].shape[1:]
    sizes = {"B": buckets, "H": heads, "D": columns}
    sizes |= {"F": len(tensors["format_lost"]) if "format_lost" in tensors else 0}
    if sizes["F"] > len(ATTENTION_FORMATS):
        raise ValueError(
            f"{where}/format_lost: {sizes['F']} formats, wanted at most {len(ATTENTION_FORMATS)}; "
            "upgrade quantkit"
        )
    check_fields(where, tensors, wanted, sizes)
    _check_ranges(where, tensors)
    _check_counts(where, tensors)


def _check_ranges(where: str, tensors: Mapping[str, Tensor]) -> None:
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
        ("call_queries", "queries"),
        ("call_keys", "keys"),
    ):
        if bool((tensors[fewer] > tensors[more]).any()):
            raise ValueError(f"{where}/{fewer}: more than {more}")
