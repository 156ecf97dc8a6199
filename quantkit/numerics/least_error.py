"""Scales of weights with the least quantization error among the candidates of a rule."""

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import Granularity, PerGroup, PerTensor
from quantkit.numerics.scale_rules import WEIGHT_SCALES, first_of_least
from quantkit.numerics.scales import amax_scale, power_of_two
from quantkit.numerics.squared_error import squared_error


def choose_scale(rows: Tensor, fmt: NumberFormat, granularity: Granularity, rule: str) -> Tensor:
    """Return the scale of least squared error among those that a rule tries.

    Args:
        rows: (N, K) float32, finite.
        rule: of ``WEIGHT_SCALES``.

    Returns:
        float32 scale; [], [N] or [N, K / G]; of equals the first.

    Raises:
        ShapeError: K is not a multiple of the group size.
    """
    tried = candidates(amax_scale(rows, fmt, granularity), rule)
    if len(tried) == 1:
        return tried[0]
    if isinstance(granularity, PerTensor):
        return choose_tensor_scale(tried, [rows], fmt)
    columns = columns_first(rows, granularity)
    best, least = tried[0], squared_error(columns, tried[0], fmt)
    for scale in tried[1:]:
        error = squared_error(columns, scale, fmt)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def choose_tensor_scale(
    tried: Sequence[Tensor], blocks: Iterable[Tensor], fmt: NumberFormat
) -> Tensor:
    """Return the first of scales, float32 [], that loses least on blocks of rows (R, K)."""
    errors = [array("d") for _ in tried]
    for rows in blocks:
        columns = columns_first(rows)
        for error, scale in zip(errors, tried, strict=True):
            error.extend(squared_error(columns, scale, fmt).tolist())
    return tried[first_of_least(errors)]


def candidates(base: Tensor, rule: str) -> list[Tensor]:
    """Return the scales that a rule of ``WEIGHT_SCALES`` tries.

    A fraction of a subnormal may be zero: that loses no less than the base, which comes first.

    Args:
        base: the amax scale.
        rule: its name.
    """
    tried = WEIGHT_SCALES[rule]
    base = power_of_two(base) if tried.pow2 else base
    return [base * fraction for fraction in tried.fractions]


def columns_first(rows: Tensor, granularity: Granularity | None = None) -> Tensor:
    """Return rows (N, K) as (K, N), or as (G, N, K / G) where groups have scales."""
    if isinstance(granularity, PerGroup):
        return rows.reshape(len(rows), -1, granularity.size).permute(2, 0, 1).contiguous()
    return rows.t().contiguous()
