"""Optimal brain surgery on rows: dropping and rounding weights while the others make up for it.

What is minimised is the error of a layer's output, the trace of (W' - W) M (W' - W)^T, where M is
the second moment E[x x^T] of its input, or the covariance where the bias takes up the mean. Rows of
W are independent. Columns are settled one after another; each one makes up for the errors of those
before it, as the factor of M says. With a mask that is SparseGPT, on a grid it is GPTQ, and with
both a sparse weight lands on the grid in one pass.

The papers spread a column's error over the free ones with the inverse of M. With the square-root
free Cholesky factor M = L^T D L (L unit lower triangular), the error is the sum over columns j of
D_j ((C L^T)_j)^2 for a change C: column j makes up for those before it by asking for the C_j that
makes its term zero. The weights are the same, and nothing is inverted: one factoring instead of
three, and each column is touched when its turn comes instead of once for every column before it.

Sources: Frantar and Alistarh 2023, SparseGPT, arXiv:2301.00774; Frantar et al. 2022, GPTQ,
arXiv:2210.17323.
"""

from dataclasses import dataclass
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import NonFiniteError
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.masks import Pattern, choose_first_axis
from quantkit.numerics.scales import cast

#: What GPTQ adds to the diagonal, as a share of its mean. From 1e-4 to 1e-3 the demo's pictures are
#: the same.
ROUNDING_DAMPING = 1e-3

#: Columns settled one at a time between two matrix products. From 8 to 64 the time is the same
#: within what a busy machine varies by; 4 takes longer.
_LEAF = 32

#: Square of the share of its first residual at which a row counts as solved: float32 has 24 bits,
#: and rounding makes the last four noise.
_SOLVED = 2.0**-40


@dataclass(frozen=True, eq=False)
class Factor:
    """A damped moment matrix M = L^T D L, in the order that columns are settled in."""

    #: float32 (K, K), unit lower triangular L: what the changes of columns i ask of column j > i
    lower: Tensor
    #: float32 (K,), D: what an error costs that the columns after it make up for, 1 / [M^-1]_jj
    pivots: Tensor
    #: int64 (K,), the column that stands at each place
    order: Tensor
    #: bool (K,) by place: the input is always zero, so the weight says nothing
    dead: Tensor


class AnyGrid(Protocol):
    """The values that each weight of rows (R, K) may take."""

    @property
    def scale(self) -> Tensor:
        """The scale of each column, float32, broadcastable against the rows."""

    def round(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return the nearest values of the grid, of a column (R,) and its scales (R,)."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The values that a weight may take: codes of a format times a scale."""

    fmt: NumberFormat
    #: float32, broadcastable against the (R, K) rows
    scale: Tensor

    def round(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return the nearest value of the grid, saturating."""
        return cast(values / scale, self.fmt).float() * scale


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


def factorize(moment: Tensor, *, damping: float, order: Tensor | None = None) -> Factor:
    """Return the factor that ``settle_rows`` needs.

    Args:
        moment: (K, K) symmetric, positive semi-definite; float32 or float64.
        damping: added to the diagonal, as a share of its mean: what the moment does not know. Ten
            times as much, once or more, where that is less than the moment's own rounding.
        order: int64 (K,), the order in which columns are settled; None: as they are.

    Returns:
        computed in float64, stored in float32. A column of power zero stands alone.

    Raises:
        NonFiniteError: NaN or Inf.
    """
    assert damping > 0
    order = torch.arange(len(moment), device=moment.device) if order is None else order
    # Backwards: turned round again, the usual factor has the last column make up for all.
    back = order.flip(0)
    work = moment[back][:, back].double()
    diagonal = work.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal.clamp(min=0).mean())
    diagonal[dead] = 1.0
    square_root = _square_root(work, damping * mean)
    # LAPACK's columns are our rows: the transpose is contiguous, and stays so.
    upper: Tensor = square_root.t().float()
    roots = upper.diagonal().clone()
    lower = upper.div_(roots.unsqueeze(1)).flip(0, 1)
    return Factor(lower, roots.square().flip(0), order, dead.flip(0))


def expected_error(factor: Factor, inputs: Tensor, errors: Tensor) -> float:
    """Return the squared error of outputs that rounding by a factor should make.

    Rounding leaves C L^T = e in each column, which is as large as when it is rounded alone. On an
    input x that the factor need not know, C x is the sum of e_j y_j, where L^T y = x. Columns
    that ask for values beyond the grid saturate, which is not foreseen.

    Args:
        factor: of K columns.
        inputs: float32 (M, K).
        errors: float32 (K,), the sum over weights (R, K) of (round(w) - w)^2.

    Returns:
        the sum over the inputs and the R outputs.
    """
    upper, columns = factor.lower.t(), inputs[:, factor.order].t()
    shares = torch.linalg.solve_triangular(upper, columns, upper=True, unitriangular=True)
    return float(shares.square().sum(dim=1).double() @ errors[factor.order].double())


def _square_root(moment: Tensor, damping: float) -> Tensor:
    """Return the Cholesky factor of ``moment`` (K, K), whose diagonal gains ``damping`` in place.

    A covariance is the difference of two float32 matrices: where the mean is a thousand times the
    spread, as of a layer that reads little but the timestep, their rounding leaves eigenvalues
    below zero that outweigh the damping. Adding their bound always would blunt all other layers.
    """
    diagonal = moment.diagonal()
    limit, given = float(diagonal.max()), 0.0
    # With K times its largest power added, the diagonal of any moment outweighs its rows.
    while damping <= 10 * limit * len(moment) < inf:
        diagonal += damping - given
        square_root, failed = torch.linalg.cholesky_ex(moment)
        if not bool(failed):
            found: Tensor = square_root
            return found
        damping, given = max(10 * damping, limit * 1e-9), damping
    raise NonFiniteError("second moments: NaN, Inf or all zero; collect the hessians again")


def settle_rows(
    rows: Tensor,
    factor: Factor,
    *,
    mask: Tensor | Pattern | None = None,
    grid: AnyGrid | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop and round weights column by column, the later ones making up for the earlier.

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
    run = _RowState(factor, rows, mask, grid)
    run.settle(0, rows.shape[1])
    values, kept = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)
    values[:, order], kept[:, order] = run.values.t(), run.kept.t()
    return values, kept


class _RowState:
    """The state of one call of ``settle_rows``.

    Everything is (K, R), columns in the order of the factor, so that a column is contiguous.
    """

    def __init__(
        self, factor: Factor, rows: Tensor, mask: Tensor | Pattern | None, grid: AnyGrid | None
    ) -> None:
        self._factor = factor
        self._pattern = mask if isinstance(mask, Pattern) else None
        self._rows = rows.t()[factor.order]
        #: what each column should be, given those that are settled and folded in; then what it is
        self.values = self._rows.clone()
        self._changes = torch.zeros_like(self.values)
        self.kept = (
            mask.t()[factor.order]
            if isinstance(mask, Tensor)
            else torch.ones_like(self.values, dtype=torch.bool)
        )
        self._grid = grid
        self._scale = None if grid is None else grid.scale.expand_as(rows).t()[factor.order]
        m = 1 if self._pattern is None else self._pattern.m
        self._leaf = m * max(1, _LEAF // m)
        self._inverses = _inverse_groups(factor, m)
        self._prices = factor.pivots.masked_fill(factor.dead, 0.0).unsqueeze(1)

    def settle(self, first: int, stop: int) -> None:
        """Settle columns, those before ``first`` being folded in already.

        By halves: most of the sums are products of large matrices.
        """
        leaves = -(-(stop - first) // self._leaf)
        if leaves <= 1:
            self._settle_leaf(first, stop)
            return
        middle = first + leaves // 2 * self._leaf
        self.settle(first, middle)
        asked = self._factor.lower[middle:stop, first:middle]
        self.values[middle:stop].addmm_(asked, self._changes[first:middle], alpha=-1)
        self.settle(middle, stop)

    def _settle_leaf(self, first: int, stop: int) -> None:
        leaf = slice(first, stop)
        # Whole, and not only what is settled: changes are zero until then, and slices take time.
        changes, lower = self._changes[leaf].t(), self._factor.lower[leaf, leaf].unbind()
        values, kept = self.values[leaf].unbind(), self.kept[leaf].unbind()
        before, after = self._rows[leaf].unbind(), self._changes[leaf].unbind()
        for i in range(stop - first):
            if self._pattern is not None and i % self._pattern.m == 0:
                self._choose(leaf, first + i)
            column = torch.addmv(values[i], changes, lower[i], alpha=-1)
            if self._grid is not None and self._scale is not None:
                column = self._grid.round(column, self._scale[first + i])
            torch.mul(column, kept[i], out=values[i])
            torch.sub(values[i], before[i], out=after[i])

    def _choose(self, leaf: slice, first: int) -> None:
        """Choose the mask of the group that begins at ``first``, inside a leaf."""
        assert self._pattern is not None
        group = slice(first, first + self._pattern.m)
        asked = self._factor.lower[group, leaf]
        target = torch.addmm(self.values[group], asked, self._changes[leaf], alpha=-1)
        # What the group would be if all of it stayed free: later ones make up for earlier.
        before = self._rows[group]
        free = torch.addmm(before, self._inverses[first // self._pattern.m], target.sub_(before))
        scores = free.square_().mul_(self._prices[group])
        self.kept[group] = choose_first_axis(scores, self._pattern.n)


def _inverse_groups(factor: Factor, m: int) -> Tensor:
    """Return the inverse of each (m, m) block on the factor's diagonal, (K / m, m, m)."""
    assert bool((factor.order.reshape(-1, m).diff(dim=1) == 1).all()), (
        "the order takes groups apart"
    )
    count = len(factor.order) // m
    blocks = factor.lower.reshape(count, m, count, m).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    unit = torch.eye(m, device=blocks.device).expand_as(blocks)
    inverse: Tensor = torch.linalg.solve_triangular(blocks, unit, upper=False, unitriangular=True)
    return inverse


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
        steps: at most so many, fewer for rows that are solved; the error falls with each.

    Returns:
        (R, K) float32, zero outside the mask.
    """
    power = moment.diagonal()
    ridge = damping * power.mean() + (power <= 0)
    inverse = 1 / (power + ridge)
    damped = moment.clone()
    damped.diagonal().add_(ridge)
    keep = mask.to(rows.dtype)
    values = values.clone()
    residual = ((rows - values) @ damped).mul_(keep)
    direction = residual * inverse
    size = (residual * direction).sum(dim=1, keepdim=True)
    # A row whose residual fell this far is solved: what is left of it is rounding, and then numbers
    # below the normal range, which take a hundred times as long.
    floor = size * _SOLVED
    # Reused: fresh memory for each step would cost as much as the sums.
    image, ready = torch.empty_like(residual), torch.empty_like(residual)
    for _ in range(steps):
        going = size > floor
        if not bool(going.any()):
            break
        torch.mm(direction, damped, out=image).mul_(keep)
        curvature = torch.mul(direction, image, out=ready).sum(dim=1, keepdim=True)
        step = torch.where(going & (curvature > 0), size / curvature, 0.0)
        values.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1)
        torch.mul(residual, inverse, out=ready)
        fresh = torch.mul(residual, ready, out=image).sum(dim=1, keepdim=True)
        direction.mul_(torch.where(going, fresh / size, 0.0)).add_(ready)
        size = fresh
    return values


def output_error(change: Tensor, moment: Tensor) -> float:
    """Return the power of a layer's output error: the trace of D M D^T for a change D (R, K)."""
    return float(((change @ moment) * change).sum(dtype=torch.float64))
