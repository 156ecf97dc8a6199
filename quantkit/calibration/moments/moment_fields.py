"""Tensors of a layer's second moments, and the checks that a file of them has to pass.

A checksum says that a file is as it was written, not that it was written well. What slips through
here would end as codes that are NaN, or as weights that nobody asked for.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.calibration.statistics.fields import Field, Tensors

#: Relative error that float32 sums over very many rows may have; real ones have less than 1e-5.
_SUM_ERROR = 1e-3
#: Elements of a matrix that are compared at a time: a matrix may take half a GB.
_ELEMENTS = 1 << 22


def _sizes(second: Tensor) -> Tensor:
    """Return the root mean square of each column, (K,)."""
    power = second.diagonal()
    # Sums of squares that underflowed are zero where their products with others are not.
    return (power + torch.finfo(power.dtype).tiny).sqrt_()


def _check_mean(tensors: Tensors) -> str:
    power, mean = tensors["second"].diagonal(), tensors["mean"]
    if bool((power < 0).any()):
        return f"the power of a column is {float(power.min()):g}, below 0"
    larger = mean.abs() > _sizes(tensors["second"]) * (1 + _SUM_ERROR)
    return "larger than the root mean square, which is impossible" if bool(larger.any()) else ""


def _check_second(tensors: Tensors) -> str:
    second = tensors["second"]
    size = _sizes(second)
    for rows, columns, sizes in _blocks(second, size):
        # Every block takes the tolerance as its one piece of fresh memory of its size.
        bound = sizes.unsqueeze(1) * size
        if bool((rows.abs() > bound * (1 + _SUM_ERROR)).any()):
            return "an entry larger than its diagonal allows, which is impossible"
        if bool(((rows - columns).abs_() > bound.mul_(_SUM_ERROR)).any()):
            return "not symmetric"
    return ""


def _check_weights(tensors: Tensors) -> str:
    total = float(tensors["held_weights"].sum())
    return "" if total > 0 else "all zero, expected the weights of timesteps"


#: Axes: K columns, R rows of other prompts, which are absent where there were too few.
FIELDS = {
    "mean": Field(torch.float32, "K", signed=True, check=_check_mean),
    "second": Field(torch.float32, "KK", signed=True, check=_check_second),
    "held_rows": Field(torch.bfloat16, "RK", signed=True, optional=True),
    "held_weights": Field(torch.float32, "R", optional=True, check=_check_weights),
}


def _blocks(second: Tensor, size: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield rows of a matrix, the same rows of its transpose, and what belongs to each row."""
    step = max(1, _ELEMENTS // max(1, len(second)))
    for first in range(0, len(second), step):
        part = slice(first, first + step)
        yield second[part], second[:, part].t(), size[part]
