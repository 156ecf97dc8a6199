"""Sums of products of rows, x x', and draws of rows that layers of one shape share."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

#: Rows that a matrix unit sums up by itself: it cuts off what float32 does not hold, always towards
#: zero. Of so many it loses 2.4e-6 of a square at most, float32 sums of all rows 2e-6 to 7e-6.
_ROWS = 512
#: Sides of what a block of a GPU multiplies, and blocks that keep it busy.
_TILE, _TILES = 128, 264
#: Columns of a part of the matrix, of a small one and of others: what lies above the diagonal is
#: not computed, but in these.
_PANELS, _SMALL = (640, 1280), 2880


class Products:
    """Products of one call's rows, added to a symmetric matrix of which the lower half counts."""

    def __init__(self, second: Tensor, weight: float | Tensor) -> None:
        """Begin with no rows.

        Args:
            second: float32 (K, K).
            weight: of the rows; as a tensor of one number, a graph reads it at each launch.
        """
        self._second, self._weight = second, weight
        self._width = _PANELS[len(second) > _SMALL]
        #: by first column: the sum over rows, in several parts where the panel is small
        self._panels: dict[int, Tensor] = {}

    def add(self, rows: Tensor) -> None:
        """Take rows x in.

        Args:
            rows: (R, K) of any float dtype. Products of 16-bit numbers are exact in float32, so
                NVIDIA's matrix units take them as they are.
        """
        if not rows.is_cuda and not isinstance(self._weight, Tensor):
            self._second.addmm_(rows.float().t(), rows.float(), alpha=self._weight)
            return
        if not _on_matrix_units(rows):
            rows = rows.float()
        for start in range(0, len(self._second), self._width):
            sides = (rows[:, start:], rows[:, start : start + self._width])
            self._panels[start] = _outer(*sides, self._panels.get(start))

    def finish(self) -> None:
        """Add weight * x x' of all rows to the matrix."""
        for start, parts in self._panels.items():
            found = parts.sum(dim=0) if len(parts) > 1 else parts[0]
            sums = self._second[start:, start : start + self._width]
            if isinstance(self._weight, Tensor):
                sums.addcmul_(found, self._weight)
            else:
                sums.add_(found, alpha=self._weight)


def column_sums(rows: Tensor) -> Tensor:
    """Return the sum of rows (R, K), float64; of 16-bit rows, parts are summed in float32."""
    if not rows.is_cuda and rows.dtype.itemsize > 2:
        return rows.sum(dim=0, dtype=torch.float64)
    # Summed in float64, torch would first write all of it in float64.
    whole = len(rows) // _ROWS * _ROWS
    parts = _in_parts(rows[:whole]).sum(dim=1, dtype=torch.float32)
    rest = rows[whole:].sum(dim=0, dtype=torch.float32)
    return parts.sum(dim=0, dtype=torch.float64) + rest


def _on_matrix_units(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype.itemsize == 2 and torch.version.hip is None


def _outer(left: Tensor, right: Tensor, sums: Tensor | None) -> Tensor:
    """Return x y' over rows x and y, added to sums, float32 (parts, M, N), if there are any."""
    if not _on_matrix_units(left):
        if sums is None:
            return (left.t() @ right).unsqueeze(0)
        sums[0].addmm_(left.t(), right)
        return sums
    whole = len(left) // _ROWS * _ROWS
    if whole:
        sums = _of_parts(left[:whole], right[:whole], sums)
    return _of_fewer(left[whole:], right[whole:], sums)


def _of_parts(left: Tensor, right: Tensor, sums: Tensor | None) -> Tensor:
    """Add parts of rows, as many at once as the sums have parts: several of a small matrix."""
    if sums is None:
        tiles = -(-left.shape[1] // _TILE) * -(-right.shape[1] // _TILE)
        count = min(-(-_TILES // tiles) * _ROWS, len(left))
        a, b = _in_parts(left[:count]), _in_parts(right[:count])
        sums = torch.bmm(a.mT, b, out_dtype=torch.float32)
        left, right = left[count:], right[count:]
    sides = (torch.split(side, len(sums) * _ROWS) for side in (left, right))
    for a, b in zip(*sides, strict=True):
        if len(a):
            to = sums[: len(a) // _ROWS]
            given = (_in_parts(a).mT, _in_parts(b))
            torch.baddbmm(to, *given, out_dtype=torch.float32, out=to)
    return sums


def _of_fewer(left: Tensor, right: Tensor, sums: Tensor | None) -> Tensor:
    """Add fewer rows than a part has, or none."""
    if sums is None:
        return torch.mm(left.t(), right, out_dtype=torch.float32).unsqueeze(0)
    if len(left):
        torch.addmm(sums[0], left.t(), right, out_dtype=torch.float32, out=sums[0])
    return sums


def _in_parts(rows: Tensor) -> Tensor:
    return rows.view(len(rows) // _ROWS, _ROWS, rows.shape[1])


def mirror(second: Tensor) -> None:
    """Make a matrix symmetric, in place, from its lower half."""
    lower = second.tril(-1)
    second.tril_().add_(lower.t())


#: That are kept: a call of SDXL draws a hundred times at batch 8, picture by picture.
_DRAWS = 256


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


@lru_cache(maxsize=_DRAWS)
def next_draw(before: Draw, rows: int) -> Draw:
    """Put so many rows into a random order. Layers that saw the same shapes share the answer."""
    generator = torch.Generator()
    generator.set_state(before.state)
    order = torch.randperm(rows, generator=generator)
    return Draw(generator.get_state(), order)


@lru_cache(maxsize=_DRAWS)
def first_rows(draw: Draw, count: int, device: torch.device) -> Tensor:
    """Return the first of the drawn rows, on a device."""
    return draw.order[:count].to(device)
