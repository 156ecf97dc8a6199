"""Second moments of 3x3 windows of pictures, from products of pixels and their neighbours.

The windows of a picture overlap: what two of their taps multiply depends on the taps' distance
alone, but for windows at the edges. So the 45 products of two taps, each over all windows, are 13
products of the picture and itself, shifted, less those along the edges; and no window is unfolded.
"""

from itertools import product

import torch
from torch import Tensor, nn

from quantkit.calibration.products import add_outer, mirror

#: Distances of two taps (down, across), one of each pair that mirror each other.
DISTANCES = ((0, 0), (0, 1), (0, 2), *product((1, 2), range(-2, 3)))
_REACH = 2
#: Places of a tap along one axis, from the middle of the window; windows of the first or the last
#: pixels have no such neighbour.
_TAPS = (-1, 0, 1)


def reads_neighbours(module: nn.Module) -> bool:
    """Tell whether a layer's rows are 3x3 windows around every pixel, zeros beyond the edges."""
    return (
        isinstance(module, nn.Conv2d)
        and (module.kernel_size, module.stride, module.dilation) == ((3, 3), (1, 1), (1, 1))
        and (module.padding, module.padding_mode, module.groups) == ((1, 1), "zeros", 1)
    )


class NeighbourSums:
    """The sums over the windows of many pictures of C channels."""

    def __init__(self, channels: int, device: torch.device) -> None:
        """Begin with nothing seen."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, channels, channels, device=device)

        #: of pixels and those at each distance
        self._whole = zeros(len(DISTANCES))
        #: the same along the first and last row, and the first and last column, by distance
        self._edges = zeros(2, 2, 1 + _REACH)
        #: of the pixels in the corners: first or last row, first or last column
        self._corners = zeros(2, 2)
        #: sums of pixels, float64, likewise
        self._sum = torch.zeros(channels, device=device, dtype=torch.float64)
        self._edge_sums = self._sum.new_zeros(2, 2, channels)
        self._corner_sums = self._sum.new_zeros(2, 2, channels)

    def add(self, values: Tensor, weight: float) -> int:
        """Add pictures (B, C, H, W); return how many windows they have."""
        pictures, channels, height, width = values.shape
        # Zeros behind each row and each picture: what lies beyond an edge adds nothing.
        padded = values.new_zeros(pictures, height + _REACH, width + _REACH, channels)
        padded[:, :height, :width] = values.permute(0, 2, 3, 1)
        flat = padded.view(-1, channels)
        for sums, (down, across) in zip(self._whole, DISTANCES, strict=True):
            _add_shifted(sums, flat, down * (width + _REACH) + across, weight)
        self._sum.add_(flat.sum(dim=0, dtype=torch.float64), alpha=weight)
        self._add_edges(padded, (height - 1, width - 1), weight)
        return pictures * height * width

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the sums of x x', float32 (K, K), and x, float64 (K,), of windows.

        Columns are as the kernels have them, channels last.
        """
        channels = len(self._sum)
        taps = list(product(_TAPS, _TAPS))
        second = self._whole.new_empty(len(taps), channels, len(taps), channels)
        for (i, one), (j, other) in product(enumerate(taps), enumerate(taps)):
            if i > j:
                continue
            sums = self._of_taps(one, other)
            if i == j:
                mirror(sums)
            second[i, :, j], second[j, :, i] = sums, sums.t()
        mean = torch.stack([self._of_tap(tap) for tap in taps])
        second = second.view(len(taps) * channels, -1)
        # What a tap never reads, in pictures of one line, is a difference of equal sums.
        second.diagonal().clamp_(min=0)
        return second, mean.flatten()

    def _add_edges(self, padded: Tensor, last: tuple[int, int], weight: float) -> None:
        """Add what lies along the edges of pictures (B, H + 2, W + 2, C)."""
        for axis, line in product(range(2), range(2)):
            edge = padded.select(1 + axis, line * last[axis]).reshape(-1, padded.shape[-1])
            for sums, distance in zip(self._edges[axis, line], range(1 + _REACH), strict=True):
                _add_shifted(sums, edge, distance, weight)
            self._edge_sums[axis, line].add_(edge.sum(dim=0, dtype=torch.float64), alpha=weight)
        for row, column in product(range(2), range(2)):
            corner = padded[:, row * last[0], column * last[1]]
            add_outer(self._corners[row, column], corner, corner, weight)
            total = corner.sum(dim=0, dtype=torch.float64)
            self._corner_sums[row, column].add_(total, alpha=weight)

    def _of_taps(self, one: tuple[int, int], other: tuple[int, int]) -> Tensor:
        """Return the sums of products of two taps, the first one's channels down."""
        down, across = (b - a for a, b in zip(one, other, strict=True))
        found = self._at(down, across).clone()
        # Only taps at one edge of the window read what windows beyond the picture would.
        lines = [_unread(a) if a == b else None for a, b in zip(one, other, strict=True)]
        for axis, (line, distance) in enumerate(zip(lines, (across, down), strict=True)):
            if line is not None:
                edge = self._edges[axis, line, abs(distance)]
                found -= edge if distance >= 0 else edge.t()
        if lines[0] is not None and lines[1] is not None:
            found += self._corners[lines[0], lines[1]]
        return found

    def _at(self, down: int, across: int) -> Tensor:
        if (down, across) in DISTANCES:
            return self._whole[DISTANCES.index((down, across))]
        return self._whole[DISTANCES.index((-down, -across))].t()

    def _of_tap(self, tap: tuple[int, int]) -> Tensor:
        """Return the sum of what a tap reads."""
        found = self._sum.clone()
        lines = [_unread(place) for place in tap]
        for axis, line in enumerate(lines):
            if line is not None:
                found -= self._edge_sums[axis, line]
        if lines[0] is not None and lines[1] is not None:
            found += self._corner_sums[lines[0], lines[1]]
        return found


def _unread(place: int) -> int | None:
    """Return which line of a picture a tap never reads, the first (0) or the last (1)."""
    return {-1: 1, 0: None, 1: 0}[place]


def _add_shifted(sums: Tensor, rows: Tensor, distance: int, weight: float) -> None:
    """Add products of rows (R, C) and those so far behind them."""
    count = max(len(rows) - distance, 0)
    add_outer(sums, rows[:count], rows[distance : distance + count], weight)
