"""Float16 scales for groups of weights, as GGML's blocks have them."""

import torch
from torch import Tensor

from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.least_error import columns_first
from quantkit.numerics.scale_rules import MSE_GRID
from quantkit.numerics.squared_error import squared_error

_LARGEST = torch.finfo(torch.float16).max


def choose_block_scales(
    rows: Tensor, fmt: NumberFormat, observer: str, power: Tensor | None = None
) -> Tensor:
    """Return a scale for every block of ``fmt.block`` weights of rows.

    Args:
        rows: (R, K) float32, finite.
        fmt: q4_0 or q8_0.
        observer: amax, where the value of largest size gets the code of largest size; or mse, the
            least squared error among fractions of that scale, of either sign where the codes are
            not symmetric.
        power: (K,) what an error of each column costs, for mse; None: all the same.

    Returns:
        (R, K / block) float32 that float16 holds exactly, never zero: 1.0 for a block of zeros.
        What float16 cannot hold is its largest value, and weights are clipped.
    """
    groups = rows.reshape(len(rows), -1, fmt.block)
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    start = largest.abs() / fmt.max if fmt.symmetric else largest / fmt.min
    if observer == "amax":
        return _as_float16(start)
    columns = columns_first(rows, PerGroup(fmt.block))
    costs = None if power is None else power.double().reshape(-1, 1, fmt.block).permute(2, 1, 0)
    best = _as_float16(start)
    least = squared_error(columns, best, fmt, costs=costs)
    for sign in (1,) if fmt.symmetric else (1, -1):
        for fraction in MSE_GRID:
            tried = _as_float16(start * (sign * fraction))
            error = squared_error(columns, tried, fmt, costs=costs)
            better = error < least
            best, least = torch.where(better, tried, best), torch.where(better, error, least)
    return best


def _as_float16(scale: Tensor) -> Tensor:
    rounded = scale.clamp(-_LARGEST, _LARGEST).half().float()
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
