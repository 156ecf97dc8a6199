"""Optimal brain surgery on rows: dropping and rounding weights while the others make up for it.

What is minimised is the error of a layer's output, the trace of (W' - W) M (W' - W)^T, where M is
the second moment E[x x^T] of its input, or the covariance where the bias takes up the mean. Rows of
W are independent. Columns are settled one after another; each one's error is spread over those that
are still free, as the inverse of M says. With a mask that is SparseGPT, on a grid it is GPTQ, and
with both a sparse weight lands on the grid in one pass.

Sources: Frantar and Alistarh 2023, SparseGPT, arXiv:2301.00774; Frantar et al. 2022, GPTQ,
arXiv:2210.17323.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.numerics.formats import FloatFormat
from quantkit.numerics.masks import Pattern, choose_mask

#: Columns between two updates of all that follow: a matrix product does what one column at a time
#: would be bound by memory for.
_BLOCK = 64


@dataclass(frozen=True, eq=False)
class InverseFactor:
    """The inverse of a damped moment matrix, factored in the order that columns are settled in."""

    #: float32 (K, K), upper triangular U with U^T U the inverse
    upper: Tensor
    #: int64 (K,), the column that stands at each place
    order: Tensor
    #: bool (K,) by place: the input is always zero, so the weight says nothing
    dead: Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """The values that a weight may take: codes of a format times a scale."""

    fmt: FloatFormat
    #: float32, broadcastable against the (R, K) rows
    scale: Tensor

    def round(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return the nearest value of the grid, saturating."""
        codes = (values / scale).clamp(-self.fmt.max, self.fmt.max).to(self.fmt.torch_dtype)
        return codes.float() * scale


def falling_power(moment: Tensor, group: int = 1) -> Tensor:
    """Return the columns by falling power of their input, groups of consecutive ones together.

    Args:
        moment: (K, K).
        group: columns that stay neighbours, as the m of n:m; it divides K.

    Returns:
        int64 (K,). Equal powers keep their order.
    """
    power = moment.diagonal().reshape(-1, group).sum(dim=1)
    places = power.argsort(descending=True, stable=True)
    columns = torch.arange(moment.shape[0], device=moment.device).reshape(-1, group)
    return columns[places].reshape(-1)


def factorize(moment: Tensor, *, damping: float, order: Tensor | None = None) -> InverseFactor:
    """Return the factor of the inverse that ``settle_rows`` needs.

    Args:
        moment: (K, K) symmetric, positive semi-definite; float32 or float64.
        damping: added to the diagonal, as a share of its mean: what the moment does not know.
        order: int64 (K,), the order in which columns are settled; None: as they are.

    Returns:
        computed in float64, stored in float32. A column of power zero stands alone.
    """
    assert damping > 0
    work = moment.double()
    order = torch.arange(len(work), device=work.device) if order is None else order
    work = work[order][:, order]
    diagonal = work.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal.mean())
    diagonal[dead] = 1.0
    diagonal += damping * mean
    lower, failed = torch.linalg.cholesky_ex(work)
    assert not bool(failed), "a moment plus its damping is positive definite"
    upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return InverseFactor(upper.float(), order, dead)


def settle_rows(
    rows: Tensor,
    factor: InverseFactor,
    *,
    mask: Tensor | Pattern | None = None,
    grid: Grid | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop and round weights column by column, the free ones making up for it.

    Args:
        rows: (R, K) float32, finite, on the device of the factor.
        factor: of the layer's input.
        mask: bool (R, K), which weights are kept; or a pattern, whose groups choose for themselves
            when their turn comes, keeping the largest w^2 / [M^-1]_jj; then the factor's order
            keeps groups together. None: all.
        grid: what kept weights are rounded to; None: nothing.

    Returns:
        (R, K) float32 values, zero where nothing is kept; and the bool (R, K) mask.
    """
    order = factor.order
    work = rows[:, order]
    run = _Run(factor, mask[:, order] if isinstance(mask, Tensor) else mask, grid, work)
    for first in range(0, rows.shape[1], run.block):
        run.settle(first, min(first + run.block, rows.shape[1]))
    values, kept = torch.empty_like(rows), torch.empty_like(run.kept)
    values[:, order], kept[:, order] = run.values, run.kept
    return values, kept


class _Run:
    """The state of one call of ``settle_rows``, columns in the order of the factor."""

    def __init__(
        self, factor: InverseFactor, mask: Tensor | Pattern | None, grid: Grid | None, work: Tensor
    ) -> None:
        self._factor = factor
        self._grid = grid
        self._pattern = mask if isinstance(mask, Pattern) else None
        if self._pattern is not None:
            groups = factor.order.reshape(-1, self._pattern.m)
            assert bool((groups.diff(dim=1) == 1).all()), "the order takes groups apart"
        self._scale = None if grid is None else grid.scale.expand_as(work)[:, factor.order]
        #: the weights that are free still, with all that was spread over them
        self._free = work
        self.values = torch.zeros_like(work)
        everything = torch.ones_like(work, dtype=torch.bool)
        self.kept = mask if isinstance(mask, Tensor) else everything
        m = 1 if self._pattern is None else self._pattern.m
        self.block = m * max(1, _BLOCK // m)

    def settle(self, first: int, stop: int) -> None:
        """Settle the columns of one block, then spread its errors over all that follow."""
        upper = self._factor.upper[first:stop, first:stop]
        work = self._free[:, first:stop].clone()
        errors = torch.empty_like(work)
        for j in range(stop - first):
            if self._pattern is not None and j % self._pattern.m == 0:
                self._choose(work, upper, first, j)
            value = self._settled(work[:, j], first + j)
            self.values[:, first + j] = value
            errors[:, j] = (work[:, j] - value) / upper[j, j]
            work[:, j + 1 :].addr_(errors[:, j], upper[j, j + 1 :], alpha=-1)
        self._free[:, stop:].addmm_(errors, self._factor.upper[first:stop, stop:], alpha=-1)

    def _choose(self, work: Tensor, upper: Tensor, first: int, j: int) -> None:
        assert self._pattern is not None
        here, there = slice(j, j + self._pattern.m), slice(first + j, first + j + self._pattern.m)
        scores = (work[:, here] / upper.diagonal()[here]).square()
        scores = scores.masked_fill(self._factor.dead[there], 0.0)
        self.kept[:, there] = choose_mask(scores, self._pattern)

    def _settled(self, column: Tensor, place: int) -> Tensor:
        if self._grid is not None and self._scale is not None:
            column = self._grid.round(column, self._scale[:, place])
        return column * self.kept[:, place]


def refit_rows(
    rows: Tensor, values: Tensor, mask: Tensor, moment: Tensor, *, damping: float, steps: int
) -> Tensor:
    """Return the kept weights of least error, all of them free at once.

    ``settle_rows`` never takes back what an early column settled; here every kept weight moves. The
    damped least squares of each row are solved by conjugate gradients, preconditioned by the
    diagonal: one matrix product a step for all rows together, where elimination would factor a
    matrix of half of K for every row.

    Args:
        rows: (R, K) float32, what is approximated.
        values: (R, K) float32, where to start; zero outside the mask.
        mask: bool (R, K), which weights are kept.
        moment: (K, K) float32.
        damping: as in ``factorize``.
        steps: at most so many; the error falls with each.

    Returns:
        (R, K) float32, zero outside the mask.
    """
    power = moment.diagonal()
    ridge = damping * power.mean() + (power <= 0)
    inverse = 1 / (power + ridge)

    def gradient(change: Tensor) -> Tensor:
        return (change @ moment + change * ridge) * mask

    values = values.clone()
    residual = -gradient(values - rows)
    direction = residual * inverse
    size = (residual * direction).sum(dim=1, keepdim=True)
    for _ in range(steps):
        image = gradient(direction)
        curvature = (direction * image).sum(dim=1, keepdim=True)
        # A row that is solved has no direction left.
        step = torch.where(curvature > 0, size / curvature, torch.zeros_like(size))
        values += step * direction
        residual -= step * image
        ready = residual * inverse
        fresh = (residual * ready).sum(dim=1, keepdim=True)
        direction = ready + torch.where(size > 0, fresh / size, torch.zeros_like(size)) * direction
        size = fresh
    return values


def output_error(change: Tensor, moment: Tensor) -> float:
    """Return the power of a layer's output error: the trace of D M D^T for a change D (R, K)."""
    return float(((change @ moment) * change).sum(dtype=torch.float64))
