"""What second moments must be before they are computed with, whoever wrote their file.

A checksum says that a file is as it was written, not that it was written well. What slips through
here would end as codes that are NaN, or as weights that nobody asked for. Breaches are ValueErrors
with a short text: whoever reads the file knows its name.
"""

from collections.abc import Iterator, Mapping
from math import isfinite

import torch
from torch import Tensor

_DTYPES = {
    "second": torch.float32,
    "mean": torch.float32,
    "held_rows": torch.bfloat16,
    "held_weights": torch.float32,
}
_SIGNED = {"mean", "second", "held_rows"}

#: Relative error that float32 sums over very many rows may have; real ones have less than 1e-5.
_SUM_ERROR = 1e-3
#: Elements of a matrix that are compared at a time: a matrix may take half a GB.
_ELEMENTS = 1 << 22


def check_moments(tensors: Mapping[str, Tensor], rows: object) -> int:
    """Refuse second moments that no inputs can have; return how many rows they are of.

    Args:
        tensors: second (K, K), mean (K,) and, where rows were held out, held_rows (R, K) and
            held_weights (R,); their shapes are checked already.
        rows: how many were seen.

    Raises:
        ValueError: naming the field.
    """
    for field, tensor in tensors.items():
        _check_tensor(field, tensor, _DTYPES[field])
    if type(rows) is not int or rows < 1:
        raise ValueError(f"rows {rows!r:.40}, wanted the number of rows seen, at least 1")
    _check_second(tensors["second"], tensors["mean"])
    if "held_weights" in tensors and not float(tensors["held_weights"].sum()) > 0:
        raise ValueError("held_weights: all zero, wanted the weights of timesteps")
    return rows


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse another dtype, NaN or Inf, and a size or count below zero."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: dtype {tensor.dtype}, wanted {dtype}")
    if tensor.numel() == 0:
        return
    low, high = (float(x) for x in tensor.aminmax())
    if not (isfinite(low) and isfinite(high)):
        raise ValueError(f"{name}: NaN or Inf, wanted finite numbers")
    if low < 0 and name not in _SIGNED:
        raise ValueError(f"{name}: {low:g}, wanted nothing below zero")


def _check_second(second: Tensor, mean: Tensor) -> None:
    power = second.diagonal()
    if bool((power < 0).any()):
        raise ValueError(
            f"second: {float(power.min()):g} on its diagonal, wanted nothing below zero"
        )
    # Sums of squares that underflowed are zero where their products with others are not.
    size = (power + torch.finfo(power.dtype).tiny).sqrt_()
    if bool((mean.abs() > size * (1 + _SUM_ERROR)).any()):
        raise ValueError("mean: larger than the root mean square, which is impossible")
    for rows, columns, sizes in _blocks(second, size):
        # Every block takes the tolerance as its one piece of fresh memory of its size.
        bound = sizes.unsqueeze(1) * size
        if bool((rows.abs() > bound * (1 + _SUM_ERROR)).any()):
            raise ValueError(
                "second: an entry larger than its diagonal allows, which is impossible"
            )
        if bool(((rows - columns).abs_() > bound.mul_(_SUM_ERROR)).any()):
            raise ValueError("second: not symmetric")


def _blocks(second: Tensor, size: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield rows of a matrix, the same rows of its transpose, and what belongs to each row."""
    step = max(1, _ELEMENTS // max(1, len(second)))
    for first in range(0, len(second), step):
        part = slice(first, first + step)
        yield second[part], second[:, part].t(), size[part]
