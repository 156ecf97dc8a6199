"""Sums of products of rows, x x', and which rows are looked at: shared by layers of one shape."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

#: Rows that a matrix unit sums up by itself: it cuts off what float32 does not hold, always towards
#: zero. Of so many it loses 2.4e-6 of a square at most, float32 sums of all rows 2e-6 to 7e-6.
_ROWS = 512
#: Columns of a part of the matrix: what lies above the diagonal is not computed, but in these.
_PANEL = 1280


def add_products(second: Tensor, rows: Tensor, weight: float) -> None:
    """Add weight * x x' over rows x to a symmetric matrix, of which the lower half counts.

    Args:
        second: float32 (K, K).
        rows: (R, K) of any float dtype. Products of 16-bit numbers are exact in float32, so
            NVIDIA's matrix units take them as they are.
        weight: of these rows.
    """
    if not (rows.is_cuda and rows.dtype.itemsize == 2 and torch.version.hip is None):
        second.addmm_(rows.float().t(), rows.float(), alpha=weight)
        return
    for start in range(0, rows.shape[1], _PANEL):
        sums = second[start:, start : start + _PANEL]
        for part in torch.split(rows[:, start:], _ROWS):
            torch.addmm(
                sums, part.t(), part[:, :_PANEL], alpha=weight, out_dtype=torch.float32, out=sums
            )


def mirror(second: Tensor) -> None:
    """Make a matrix symmetric, in place, from its lower half."""
    lower = second.tril(-1)
    second.tril_().add_(lower.t())


@dataclass(frozen=True, eq=False)
class Draw:
    """The state of a random generator, and the order of rows that was drawn to get there."""

    state: Tensor
    #: int64 (rows,); empty at the start
    order: Tensor


@lru_cache(maxsize=16)
def first_draw(seed: int) -> Draw:
    """Return the start of a layer's draws."""
    return Draw(torch.Generator().manual_seed(seed).get_state(), torch.empty(0, dtype=torch.int64))


@lru_cache(maxsize=64)
def next_draw(before: Draw, rows: int) -> Draw:
    """Put so many rows into a random order. Layers that saw the same shapes share the answer."""
    generator = torch.Generator()
    generator.set_state(before.state)
    order = torch.randperm(rows, generator=generator)
    return Draw(generator.get_state(), order)


@lru_cache(maxsize=64)
def first_rows(draw: Draw, count: int, device: torch.device) -> Tensor:
    """Return the first of the drawn rows, on a device."""
    return draw.order[:count].to(device)
