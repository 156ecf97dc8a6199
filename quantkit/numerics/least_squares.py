"""Least squares under a mask: the kept weights of a layer whose output is nearest to a target.

What is minimised over the kept weights W of each output channel is the mean of |W x - y|^2 over
pairs of an input row x and a target row y, plus a small pull towards where W starts. Only sums over
the pairs are held, so any number of them can be added.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Of the squared residual at the start: float32's rounding is 6e-8, so less is noise.
_SOLVED = 1e-14


@dataclass(frozen=True, eq=False)
class Equations:
    """What the pairs say about a layer of K inputs and N outputs; float32, on one device."""

    #: (K, K) mean of x x^T; of x less its mean, where a bias takes the means up
    moment: Tensor
    #: (N, K) mean of y x^T; likewise
    cross: Tensor
    #: mean of |y|^2; likewise
    power: float
    #: (K,) and (N,) means of x and y; None without a bias
    means: tuple[Tensor, Tensor] | None

    def error(self, rows: Tensor) -> float:
        """Return the share of the target's power that (N, K) weights miss, with the best bias."""
        if self.power <= 0:
            return 0.0
        image = rows @ self.moment
        lost = ((image - 2 * self.cross) * rows).sum(dtype=torch.float64)
        return max(0.0, 1 + float(lost) / self.power)

    def bias(self, rows: Tensor) -> Tensor | None:
        """Return the best bias of (N, K) weights, (N,), or None for a layer without one."""
        if self.means is None:
            return None
        x, y = self.means
        return y - rows @ x


class EquationSums:
    """The running sums that become ``Equations``."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        """Start from nothing; the layer has ``inputs`` columns and ``outputs`` rows."""
        self._moment = torch.zeros(inputs, inputs, dtype=torch.float32, device=device)
        self._cross = torch.zeros(outputs, inputs, dtype=torch.float32, device=device)
        self._power = torch.zeros((), dtype=torch.float64, device=device)
        self._x = torch.zeros(inputs, dtype=torch.float64, device=device)
        self._y = torch.zeros(outputs, dtype=torch.float64, device=device)
        self._pairs = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add pairs, one a column.

        Args:
            x: float32 inputs (K, T).
            y: float32 targets (N, T).
        """
        self._moment.addmm_(x, x.t())
        self._cross.addmm_(y, x.t())
        self._power += y.square().sum(dtype=torch.float64)
        self._x += x.sum(dim=1, dtype=torch.float64)
        self._y += y.sum(dim=1, dtype=torch.float64)
        self._pairs += x.shape[1]

    def equations(self, *, bias: bool) -> Equations:
        """Return the means over all pairs, of which there must be one."""
        total = self._pairs
        moment, cross = self._moment / total, self._cross / total
        power = self._power / total
        if not bias:
            return Equations(moment, cross, float(power), None)
        x, y = self._x / total, self._y / total
        power -= y.square().sum()
        means = x.float(), y.float()
        return Equations(
            moment.addr_(means[0], means[0], alpha=-1),
            cross.addr_(means[1], means[0], alpha=-1),
            float(power),
            means,
        )


def solve_rows(
    equations: Equations, start: Tensor, mask: Tensor, *, ridge: float, steps: int
) -> Tensor:
    """Return the kept weights of least error, all of them free at once.

    Conjugate gradients over all output channels together, preconditioned by the diagonal: one
    product with the moment a step. Elimination would factor a matrix of the kept columns for every
    channel, which have masks of their own.

    Args:
        equations: what the weights are fitted to.
        start: (N, K) float32, where to begin, and what the ridge pulls towards; its values outside
            the mask do not count.
        mask: bool (N, K), which weights are kept.
        ridge: weight of the squared distance from the start, as a share of the mean power of an
            input; it decides what too few or alike inputs leave open. Positive.
        steps: at most so many; the error falls with each.

    Returns:
        (N, K) float32, exactly zero outside the mask.
    """
    assert ridge > 0
    # Not below the normal numbers, whose inverse is finite: inputs may have no power at all.
    pull = (ridge * equations.moment.diagonal().mean()).clamp_min(torch.finfo(torch.float32).tiny)
    inverse = mask / (equations.moment.diagonal() + pull)
    values = start * mask
    residual = (equations.cross - values @ equations.moment) * mask
    direction = residual * inverse
    size = (residual * direction).sum(dim=1, keepdim=True)
    solved = _SOLVED * size
    for _ in range(steps):
        image = (direction @ equations.moment + pull * direction) * mask
        curvature = (direction * image).sum(dim=1, keepdim=True)
        # A channel that is solved stands still: what is left of its direction would underflow.
        step = torch.where(size > solved, size / curvature, torch.zeros_like(size))
        values = values + step * direction
        residual = residual - step * image
        ready = residual * inverse
        fresh = (residual * ready).sum(dim=1, keepdim=True)
        turn = torch.where(size > solved, fresh / size, torch.zeros_like(size))
        direction = ready + turn * direction
        size = fresh
    return values
