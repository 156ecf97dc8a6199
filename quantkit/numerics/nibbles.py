"""int4 weights: two codes a byte, and an integer factor for every 32 columns of a row.

A weight is (nibble - 8) * g * scale: g an integer to 15 of either sign, scale a float32 of the
output channel. (nibble - 8) * g is an int8, so every int4 layer is an int8 one with a scale per
channel, exactly.
"""

import torch
from torch import Tensor

from quantkit.numerics.formats import INT4
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.least_error import columns_first
from quantkit.numerics.squared_error import squared_error

#: Columns that share a factor: 32 codes, or the 16 kept ones of 2:4.
GROUP = INT4.subscale_group
#: Largest factor: 8 * 15 = 120 is an int8.
MAX_FACTOR = 15

_LOWEST, _HIGHEST = int(INT4.min), int(INT4.max)
#: Sizes of factors that a search tries for a group, from the least that clips nothing downwards.
TRIED_FACTORS = 6


def pack_nibbles(codes: Tensor, group: int = GROUP) -> Tensor:
    """Return (R, K / 2) uint8 of codes (R, K) from -8 to 7, K a multiple of the group.

    Byte i of a group's has code i in its low half and code i + group / 2 in its high one, each plus
    8: GGML's order, in which one load and two masks give two runs of codes.
    """
    stored = (codes.to(torch.int16) - _LOWEST).to(torch.uint8)
    low, high = stored.reshape(-1, 2, group // 2).unbind(1)
    return (low | high << 4).reshape(codes.shape[0], -1)


def unpack_nibbles(packed: Tensor, group: int = GROUP) -> Tensor:
    """Return codes int8 (R, K) from -8 to 7 of (R, K / 2) uint8."""
    blocks = packed.reshape(-1, group // 2)
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=1).to(torch.int8) + _LOWEST
    return codes.reshape(packed.shape[0], -1)


def integer_codes(packed: Tensor, factors: Tensor) -> Tensor:
    """Return the int8 codes that nibbles stand for.

    Args:
        packed: (R, K / 2) uint8, or (R, K / 4) of the kept half of a row.
        factors: (R, K / 32) int8.

    Returns:
        int8, two codes for each byte.
    """
    group = 2 * packed.shape[1] // factors.shape[1]
    codes = unpack_nibbles(packed, group).reshape(*factors.shape, group)
    return (codes * factors.unsqueeze(-1)).reshape(packed.shape[0], -1)


def factors_are_legal(factors: Tensor) -> bool:
    """Tell whether every factor is an integer from 1 to 15, of either sign."""
    sizes = factors.to(torch.int16).abs()
    return bool(((sizes >= 1) & (sizes <= MAX_FACTOR)).all())


def amax_factors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, and of each group the least factor that clips nothing.

    The code -8 stands for the value of largest size, so that factors have its sign turned round.

    Args:
        rows: (R, K) float32, finite; zero where nothing is kept.

    Returns:
        (R,) float32, 1.0 for a row of zeros; (R, K / 32) int8, 1 for a group of zeros.
    """
    groups = rows.reshape(len(rows), -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    expected = largest / _LOWEST
    scale = expected.abs().amax(dim=1) / MAX_FACTOR
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    sizes = (expected.abs() / scale.unsqueeze(1)).ceil().clamp(1, MAX_FACTOR)
    return scale, torch.where(expected < 0, -sizes, sizes).to(torch.int8)


def mse_factors(rows: Tensor, power: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return scales and factors as ``amax_factors``, but factors of least squared error.

    Args:
        rows: (R, K) float32, finite; zero where nothing is kept.
        power: (K,) what an error of each column costs; None: all the same.
    """
    scale, start = amax_factors(rows)
    columns = columns_first(rows, PerGroup(GROUP))
    costs = None if power is None else power.double().reshape(-1, 1, GROUP).permute(2, 1, 0)
    wide = scale.unsqueeze(1)

    def error_of(factors: Tensor) -> Tensor:
        value = wide.double() * factors
        return squared_error(columns, wide * factors, INT4, value=value, costs=costs)

    best, least = start, error_of(start)
    for sign in (1, -1):
        for step in range(TRIED_FACTORS):
            tried = (sign * (start.abs() - step).clamp(min=1)).to(torch.int8)
            error = error_of(tried)
            better = error < least
            best, least = torch.where(better, tried, best), torch.where(better, error, least)
    return scale, best
