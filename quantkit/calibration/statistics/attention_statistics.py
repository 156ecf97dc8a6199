"""Statistics of an attention module: of its q, k and v, per head.

They are those of what is multiplied: after norms and rotary embeddings, without the softmax scale.
Calls with a mask are not among them, as torch computes those whatever the checkpoint says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.calibration.statistics.fields import (
    LARGEST,
    TOTAL,
    Statistics,
    Tensors,
    f32,
    f64,
    i64,
    largest_seen,
    mean_over,
    row,
    smallest_seen,
)
from quantkit.numerics.attention_formats import ATTENTION_FORMATS

#: Relative error that the float32 sums of a mean may have.
_SUM_ERROR = 1e-3


def _between(what: str) -> Callable[[Tensors], str]:
    """Return a check that means of k or v lie between the smallest and the largest."""

    def check(tensors: Tensors) -> str:
        low, high, mean = (tensors[f"{what}_{end}"] for end in ("low", "high", "mean"))
        room = _SUM_ERROR * torch.maximum(low.abs(), high.abs())
        outside = (mean < low - room) | (mean > high + room)
        return f"not between {what}_low and {what}_high" if bool(outside.any()) else ""

    return check


def _within_amax(tensors: Tensors) -> str:
    amax = tensors["q_amax"].unsqueeze(2) * (1 + _SUM_ERROR)
    return "larger than q_amax" if bool((tensors["q_mean"].abs() > amax).any()) else ""


def _no_more_than(count: str) -> Callable[[Tensors], str]:
    """Return a check that a call has no more rows than all calls."""

    def check(tensors: Tensors) -> str:
        more = tensors[f"call_{count}"] > tensors[count]
        return f"more than {count}" if bool(more.any()) else ""

    return check


_OF_QUERIES, _OF_KEYS = mean_over("queries"), mean_over("keys")


@dataclass(frozen=True, eq=False)
class AttentionStatistics(Statistics):
    """One attention module over B timestep buckets; H heads of D columns, F ATTENTION_FORMATS.

    A bucket without calls has zeros. Rows are counted per head, over all pictures of a batch.
    """

    SIZES: ClassVar = {"F": len(ATTENTION_FORMATS)}

    #: largest |q|
    q_amax: Tensor = field(metadata=row(f32, "BH", LARGEST))
    #: smallest and largest k; with any mean, the largest |k - mean| follows
    k_low: Tensor = field(metadata=row(f32, "BHD", smallest_seen("keys"), signed=True))
    k_high: Tensor = field(metadata=row(f32, "BHD", largest_seen("keys"), signed=True))
    #: the same of v
    v_low: Tensor = field(metadata=row(f32, "BHD", smallest_seen("keys"), signed=True))
    v_high: Tensor = field(metadata=row(f32, "BHD", largest_seen("keys"), signed=True))
    #: over all rows
    q_mean: Tensor = field(metadata=row(f32, "BHD", _OF_QUERIES, signed=True, check=_within_amax))
    k_mean: Tensor = field(metadata=row(f32, "BHD", _OF_KEYS, signed=True, check=_between("k")))
    v_mean: Tensor = field(metadata=row(f32, "BHD", _OF_KEYS, signed=True, check=_between("v")))
    #: rows of q, and of k and v, that were seen
    queries: Tensor = field(metadata=row(i64, "B", TOTAL))
    keys: Tensor = field(metadata=row(i64, "B", TOTAL))
    #: the most that one picture had in one call
    call_queries: Tensor = field(metadata=row(i64, "B", LARGEST, check=_no_more_than("queries")))
    call_keys: Tensor = field(metadata=row(i64, "B", LARGEST, check=_no_more_than("keys")))
    #: sum of squares that outputs lose in each format, with scales of each call's own numbers, over
    #: the sampled rows; None, like the next, but where a recipe asked
    format_lost: Tensor | None = field(default=None, metadata=row(f64, "FH", TOTAL, optional=True))
    #: sum of squares of these outputs
    format_power: Tensor | None = field(default=None, metadata=row(f64, "H", TOTAL, optional=True))

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.k_mean.shape[1]

    @property
    def columns(self) -> int:
        """The size of a head."""
        return self.k_mean.shape[2]

    def format_errors(self) -> dict[str, float] | None:
        """Return the relative error of the output by name of the format; None: not measured."""
        if self.format_lost is None or self.format_power is None:
            return None
        total = float(self.format_power.sum())
        rows = zip(ATTENTION_FORMATS, self.format_lost.sum(dim=1).tolist(), strict=True)
        return {row.name: math.sqrt(lost / total) if total else 0.0 for row, lost in rows}


def largest_about(low: Tensor, high: Tensor, mean: Tensor) -> Tensor:
    """Return the largest |x - mean| of values between ``low`` and ``high``, both of which occur."""
    return torch.maximum(high - mean, mean - low)
