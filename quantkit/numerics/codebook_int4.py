"""Weights of 4 bits whose codes are numbers of a table: ComfyUI's ``asym_w4a8_int8``.

A weight is round(table[code] * group) * channel: ``group`` an e4m3 for 16 columns of a row,
``channel`` a float32 for the row. The rounded product is an int8, clipped to 127 of either sign, by
which inputs of 8 bits are multiplied.
"""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from quantkit.numerics.formats import INT8
from quantkit.numerics.scales import scale_of_amax

#: Columns that share a factor.
GROUP = 16
#: Numbers of least squared error for groups of 16 normal values over their largest one. Kernels
#: have this table built in. Source: comfy-kitchen 0.2.40, tensor/w4a8_packed.py.
TABLE = torch.tensor([
    -0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720,
    0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671,
])  # fmt: skip

_MAX = 127.0
#: Factors that are tried for a group, counted in codes of e4m3 from that which clips nothing: each
#: is 6 to 12 % from the next. Two more of either side take a thousandth from the error.
_TRIED = (-1, 0, 1, 2, 3)


@dataclass(frozen=True, eq=False)
class CodebookGrid:
    """The values that rows (R, K) may take."""

    #: e4m3 (R, K / 16), not negative
    groups: Tensor
    #: float32 (R,)
    channels: Tensor
    #: float32 (16,), rising
    table: Tensor

    @classmethod
    def choose(cls, rows: Tensor) -> "CodebookGrid":
        """Return the grid of least squared error among those tried, of rows (R, K) float32."""
        grouped = rows.reshape(len(rows), -1, GROUP)
        amax = grouped.abs().amax(dim=2) / TABLE.max()
        channels = scale_of_amax(amax.amax(dim=1) * TABLE.max(), INT8)
        exact = (amax / channels.unsqueeze(1)).to(torch.float8_e4m3fn)
        targets = grouped / channels.reshape(-1, 1, 1)
        best, least = exact, torch.full_like(amax, torch.inf)
        for offset in _TRIED:
            code = exact.view(torch.uint8).to(torch.int16) + offset
            tried = code.clamp_(min=0).to(torch.uint8).view(torch.float8_e4m3fn)
            levels = _levels(tried.float(), TABLE)
            squares = (_nearest(targets, levels)[0] - targets).square_()
            # One by one, as no library orders sums otherwise.
            error = reduce(torch.add, squares.unbind(2))
            better = error < least
            best = torch.where(better, tried.view(torch.uint8), best.view(torch.uint8))
            best, least = best.view(torch.float8_e4m3fn), torch.where(better, error, least)
        return cls(best, channels, TABLE)

    @property
    def scale(self) -> Tensor:
        """The factor of each column, float32 (R, K)."""
        return self.groups.float().repeat_interleave(GROUP, dim=1)

    def round(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return the nearest values of the grid, of a column (R,) and its factors (R,)."""
        found, _ = _nearest((values / self.channels).unsqueeze(1), _levels(scale, self.table))
        return found.squeeze(1) * self.channels

    def codes(self, rows: Tensor) -> Tensor:
        """Return the nearest codes of rows (R, K), uint8 (R, K)."""
        targets = rows.reshape(len(rows), -1, GROUP) / self.channels.reshape(-1, 1, 1)
        _, codes = _nearest(targets, _levels(self.groups.float(), self.table))
        return codes.flatten(1).to(torch.uint8)


def pack_pairs(codes: Tensor) -> Tensor:
    """Return (R, K / 2) int8 of codes uint8 (R, K): the even column in the low half of a byte."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Return codes uint8 (..., 2 n) of int8 or uint8 (..., n), the low half of each byte first."""
    stored = packed.view(torch.uint8)
    return torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)


def table_values(packed: Tensor, groups: Tensor, table: Tensor = TABLE) -> Tensor:
    """Return the integers that codes stand for, float32 (R, K).

    Args:
        packed: (R, K / 2) int8, as ``pack_pairs`` has them.
        groups: (R, G) factors of K / G columns each, e4m3 or float32.
        table: float32 (16,).
    """
    codes = unpack_pairs(packed).reshape(*groups.shape, -1)
    values = table[codes.long()] * groups.float().unsqueeze(-1)
    return values.round_().clamp_(-_MAX, _MAX).flatten(-2)


def _levels(groups: Tensor, table: Tensor) -> Tensor:
    """Return the integers of each group, float32 (..., 16), rising."""
    return (table * groups.unsqueeze(-1)).round_().clamp_(-_MAX, _MAX)


def _nearest(targets: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest of each group's levels (..., 16), and its place, of targets (..., g)."""
    between = (levels[..., 1:] + levels[..., :-1]) / 2
    places = torch.searchsorted(between.contiguous(), targets.contiguous())
    return levels.gather(-1, places), places
