"""n:m masks: which n of every m consecutive weights along K are kept. General in n and m.

A mask is chosen from *scores* (non-negative, larger is kept), in floating point, before any cast.
Ties go to the lower position, so that a mask never depends on a sort's whims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from quantkit.errors import RecipeError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """Keep ``n`` of every ``m`` consecutive weights."""

    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


TWO_OF_FOUR = Pattern(2, 4)


def parse_pattern(text: str) -> Pattern:
    """Return the pattern written ``n:m``; ``m:n`` with the larger number first means the same.

    Raises:
        RecipeError: not two positive integers, or equal ones.
    """
    parts = text.split(":")
    if len(parts) == 2 and all(p.isascii() and p.isdigit() for p in parts):
        n, m = sorted(int(p) for p in parts)
        if 0 < n < m:
            return Pattern(n, m)
    raise RecipeError(f"pattern {text!r}: expected n:m with 0 < n < m, as 2:4 (or 4:2)")


def choose_mask(scores: Tensor, pattern: Pattern) -> Tensor:
    """Keep the ``n`` largest scores of every group of ``m`` along the last axis.

    Args:
        scores: (..., K), any float dtype, NaN-free; equal scores keep the lower position.
        pattern: how many of how many.

    Returns:
        bool mask of the same shape, exactly n True in every group.

    Raises:
        ShapeError: K is not a multiple of m.
    """
    import torch

    k = scores.shape[-1]
    if k % pattern.m:
        raise ShapeError(f"K {k} is not a multiple of {pattern.m}, which {pattern} groups need")
    groups = scores.reshape(-1, pattern.m)
    # Comparing all pairs beats topk by 4x at m = 4, and defines ties; at large m it is quadratic.
    columns = groups.unbind(1)
    kept = [_beaten_by(columns, i) < pattern.n for i in range(pattern.m)]
    return torch.stack(kept, dim=1).reshape(scores.shape)


def _beaten_by(columns: tuple[Tensor, ...], i: int) -> Tensor:
    """Count the columns that rank before column i."""
    import torch

    wins = [c >= columns[i] for c in columns[:i]] + [c > columns[i] for c in columns[i + 1 :]]
    count = torch.zeros_like(columns[i], dtype=torch.int8)
    for win in wins:
        count += win
    return count


def choose_first_axis(scores: Tensor, n: int) -> Tensor:
    """Keep the ``n`` largest of each column, as ``choose_mask`` does in each group.

    Few calls, where ``choose_mask`` makes many with little memory: for one group after another.

    Args:
        scores: (m, R), NaN-free; equal scores keep the lower position.
        n: how many.

    Returns:
        bool (m, R), exactly n True in every column.
    """
    import torch

    m = len(scores)
    earlier = torch.ones(m, m, dtype=torch.bool, device=scores.device).triu_(1).unsqueeze(2)
    rivals = scores.unsqueeze(1)
    beaten = torch.where(earlier, rivals >= scores, rivals > scores)
    return beaten.sum(dim=0) < n


def magnitude_scores(weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Score by |w|.

    Args:
        weight: (N, K) rows as the kernels read them.
        second_moment: ignored; magnitude needs no calibration.
    """
    del second_moment
    return weight.abs()


def wanda_scores(weight: Tensor, second_moment: Tensor | None) -> Tensor:
    """Score by |w| * sqrt(E[x^2]).

    Args:
        weight: (N, K).
        second_moment: (K,) mean square of each input column, from calibration.

    Raises:
        RecipeError: no calibration was given.

    Source: Sun et al. 2023, A Simple and Effective Pruning Approach for LLMs, arXiv:2306.11695.
    """
    if second_moment is None:
        raise RecipeError(
            "mask method 'wanda' needs input statistics; give a calibration",
            fields=("calibration",),
        )
    return weight.abs().float() * second_moment.float().sqrt()


Scorer: TypeAlias = "Callable[[Tensor, Tensor | None], Tensor]"

#: Methods that score a weight as it is.
MASKS: dict[str, Scorer] = {"magnitude": magnitude_scores, "wanda": wanda_scores}
#: Scores a group when all before it are settled, see ``obs.settle_rows``: there is nothing to score
#: before.
SPARSEGPT = "sparsegpt"
METHODS = (*MASKS, SPARSEGPT)
