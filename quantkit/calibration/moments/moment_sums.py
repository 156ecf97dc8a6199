"""The running sums of what one layer reads, or several that read the same: x x' and x over rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.calibration.moments.input_windows import kernel_order, read_rows
from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.moments.row_products import (
    Draw,
    Products,
    column_sums,
    first_draw,
    first_rows,
    mirror,
    next_draw,
)
from quantkit.errors import NonFiniteError

#: Rows of a picture that are looked at whatever the share: where a UNet is narrowest a picture has
#: 16 or 64, and a share of those says less than the layer has columns.
_LEAST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Summed:
    """Sums over one input, but for the products, which are added already."""

    #: float64 (K,), of the rows
    columns: Tensor
    rows: int

    def plus(self, other: "Summed") -> "Summed":
        """Return what both add."""
        return Summed(self.columns + other.columns, self.rows + other.rows)


class MomentSum:
    """The running sums of one layer, on the device."""

    def __init__(self, module: nn.Module, where: str, share: float, seed: int) -> None:
        """Begin with nothing seen.

        Args:
            module: the layer.
            where: its name, for messages.
            share: of the rows that are looked at.
            seed: of their draws.
        """
        self._module = module
        self._where = where
        self._share = share
        #: of the rows that were looked at so far
        self.draw = first_draw(seed)
        #: its state before this call, and how many rows were drawn of how many since then
        self.before, self.drawn = self.draw, list[tuple[int, int]]()
        #: rows that a recorded call reads
        self._given: Iterator[Tensor] | None = None
        weight = module.get_parameter("weight")
        k = weight[0].numel()
        self._second = torch.zeros(k, k, device=weight.device)
        self.mean = torch.zeros(k, device=weight.device, dtype=torch.float64)
        self._weight = 0.0
        self._rows = 0
        #: rows (R, K) and what each weighs
        self._held: list[tuple[Tensor, float]] = []

    def begin_call(self) -> None:
        """Say that another call of the model begins."""
        self.before, self.drawn = self.draw, []

    @contextmanager
    def reading(self, places: Sequence[Tensor]) -> Iterator[None]:
        """Look at rows that others draw, within the body: one tensor for each draw."""
        self._given = iter(places)
        try:
            yield
        finally:
            self._given = None

    def look(self, values: Tensor, weight: float | Tensor) -> Summed:
        """Add the products of what the layer multiplies, and return what else is to be added.

        Args:
            values: that the layer is called with.
            weight: of its rows; a tensor of one number, which may be another at the next launch.
        """
        columns, count, products = torch.zeros_like(self.mean), 0, Products(self._second, weight)
        for rows in read_rows(self._module, values.detach(), self._where, self._draw_rows):
            products.add(rows)
            columns += column_sums(rows)
            count += len(rows)
        products.finish()
        return Summed(columns, count)

    def count(self, rows: int, weight: float) -> None:
        """Count rows, whose sums are added."""
        self._weight += weight * rows
        self._rows += rows

    def hold(self, values: Tensor, weight: float, count: int) -> None:
        """Keep so many rows of each picture of what the layer multiplies, out of the sums."""

        def draw(rows: int, samples: int) -> Tensor:
            return self._drawn(rows, count * samples)

        for rows in read_rows(self._module, values.detach(), self._where, draw):
            self._held.append((rows.to("cpu", torch.bfloat16), weight))

    def _draw_rows(self, rows: int, samples: int) -> Tensor | None:
        """Return which rows of so many pictures are looked at, drawn at random; None: all."""
        count = max(1, round(self._share * rows), min(rows, _LEAST_ROWS * samples))
        if count == rows:
            return None
        if self._given is not None:
            return next(self._given)
        self.drawn.append((rows, count))
        return self._drawn(rows, count)

    def _drawn(self, rows: int, count: int) -> Tensor:
        self.draw = next_draw(self.draw, rows)
        return first_rows(self.draw, count, self._second.device)

    def moments(self, where: str | None = None) -> Moments:
        """Return the means, columns as the kernels have them, on the CPU.

        Args:
            where: the name of a layer that reads the same.

        Raises:
            NonFiniteError: NaN or Inf was read.
        """
        order = kernel_order(self._module).to(self._second.device)
        total = self._weight or 1.0
        mirror(self._second)
        second = (self._second / total)[order][:, order].cpu()
        mean = (self.mean / total)[order].float().cpu()
        held = self._held_rows()
        if not all(bool(x.isfinite().all()) for x in (second, *([held.rows] if held else []))):
            raise NonFiniteError(
                f"{where or self._where}: NaN or Inf in its input; if the model overflows in "
                "float16, calibrate on the device cpu, which computes in float32",
                fields=("device",),
            )
        return Moments(second, mean, self._rows, held)

    def _held_rows(self) -> HeldRows | None:
        if not self._held:
            return None
        rows = torch.cat([rows for rows, _ in self._held])[:, kernel_order(self._module)]
        weights = [torch.full((len(rows),), weight) for rows, weight in self._held]
        return HeldRows(rows.contiguous(), torch.cat(weights))


class MomentBuffers:
    """Buffers that a recorded call reads: its weight, and the rows that are looked at."""

    def __init__(self, sums: Sequence[MomentSum], device: torch.device) -> None:
        """Begin with a weight of zero, and the rows of the call that was just run.

        Args:
            sums: of that call; those that drew the same rows share them.
            device: of the inputs.
        """
        self.weight = torch.zeros((), device=device)
        groups: dict[tuple[Draw, tuple[tuple[int, int], ...]], list[MomentSum]] = {}
        for total in sums:
            groups.setdefault((total.before, tuple(total.drawn)), []).append(total)
        self.groups = [
            (found, draws, [rows.clone() for rows in _drawn_on(device, before, draws)[1]])
            for (before, draws), found in groups.items()
        ]

    def write(self, weight: float) -> bool:
        """Write what the next launch reads; False: sums that drew the same rows do no more."""
        if any(total.draw is not sums[0].draw for sums, _, _ in self.groups for total in sums):
            return False
        for sums, draws, places in self.groups:
            draw, drawn = _drawn_on(self.weight.device, sums[0].draw, draws)
            for place, rows in zip(places, drawn, strict=True):
                place.copy_(rows)
            for total in sums:
                total.draw = draw
        self.weight.fill_(weight)
        return True


def _drawn_on(
    device: torch.device, draw: Draw, counts: Sequence[tuple[int, int]]
) -> tuple[Draw, list[Tensor]]:
    """Return where drawing leads, of each number of rows so many, and which rows those are."""
    found = []
    for rows, count in counts:
        draw = next_draw(draw, rows)
        found.append(first_rows(draw, count, device))
    return draw, found
