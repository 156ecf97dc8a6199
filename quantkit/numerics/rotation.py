"""Rotation of groups of columns, which spreads a large one over its group.

The matrix is a normalized Hadamard matrix of order 4^n, symmetric and so its own inverse: the
n-fold Kronecker power of one of order 4 whose rows have one entry of the other sign. Its rows have
equal sums, so that a group of equal values stays one and does not pile up in one column.

(W R) (R x) = W x: a program that rotates inputs multiplies them by a weight whose rows are rotated.
"""

import torch
from torch import Tensor

#: Groups of columns that are rotated together, the largest first: those that comfy-kitchen's
#: kernels have (backends/hip/__init__.py of 0.2.40).
SIZES = (256, 64, 16)


def largest_size(columns: int) -> int:
    """Return the largest group that divides so many columns; 0: none does."""
    return next((size for size in SIZES if columns % size == 0), 0)


def rotate(rows: Tensor, size: int) -> Tensor:
    """Return rows (..., K) float32, each group of ``size`` columns rotated; 0: as they are.

    Rotated rows give the rows again. Sums of pairs, as no library orders them otherwise: a model
    gives the same bytes on every machine.

    Args:
        rows: K is a multiple of ``size``.
        size: a power of 4.
    """
    stride, found = 1, rows
    while stride < size:
        a, b, c, d = found.reshape(-1, 4, stride).unbind(1)
        left, right, across, down = a + b, c - d, c + d, a - b
        # Source of the order and of the signs: comfy-kitchen 0.2.40, tensor/int8_utils.py.
        turned = (left + right, left - right, across + down, across - down)
        found = torch.stack(turned, dim=1)
        stride *= 4
    assert stride == size or not size, size
    return found.reshape(rows.shape) / size**0.5 if size else rows


def rotate_moment(moment: Tensor, size: int) -> Tensor:
    """Return the second moment (K, K) of rotated inputs, of that of the inputs."""
    return rotate(rotate(moment, size).t(), size).t()
