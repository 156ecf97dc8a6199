"""A basis of queries and keys in which the first columns of each head hold most of their product.

q'k = (A'q)'(B'k) for any A B' = I. Of all of them, the one below makes the product of the first r
columns the best of rank r on average over queries and keys (Eckart and Young), and every column of
both as large as the other's. Keys count without their mean, which softmax does not see.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.errors import ShapeError
from quantkit.numerics.attention import COLUMNS, padded
from quantkit.numerics.formats import INT8
from quantkit.numerics.masks import TWO_OF_FOUR, choose_mask

#: An eigenvalue counts as at least so large a part of the largest: A and B stay invertible where
#: queries or keys fill fewer dimensions than they have, and moments are sums in float32.
_FLOOR = 1e-6
#: Parts of a head's columns that may be multiplied instead of all.
_PARTS = (1 / 2, 3 / 4)


@dataclass(frozen=True, eq=False)
class Basis:
    """Of H heads of D columns; float64."""

    #: (H, D, D): q becomes ``q @ query``
    query: Tensor
    #: (H, D, D): k becomes ``k @ key``; query key' = I
    key: Tensor
    #: (H, D), descending: what a column has of E[(q'(k - mean))^2]^1/2, the squares of which add up
    energy: Tensor


def basis_of(q_second: Tensor, k_second: Tensor, k_mean: Tensor) -> Basis:
    """Return the basis.

    Args:
        q_second: (H, D, D), E[q q'].
        k_second: (H, D, D), E[k k'].
        k_mean: (H, D).
    """
    mean = k_mean.double().unsqueeze(2)
    q_root, q_inverse = _roots(q_second.double(), q_second.double())
    k_root, k_inverse = _roots(k_second.double() - mean @ mean.mT, k_second.double())
    u, energy, v = torch.linalg.svd(q_root @ k_root)
    size = energy.sqrt().unsqueeze(1)
    return Basis(q_inverse @ u * size, k_inverse @ v.mT * size, energy)


def _roots(moments: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the roots of symmetric matrices, and their inverses.

    Args:
        moments: (H, D, D).
        like: what eigenvalues are small against.
    """
    values, vectors = torch.linalg.eigh((moments + moments.mT) / 2)
    largest = like.diagonal(dim1=1, dim2=2).amax(dim=1, keepdim=True)
    # A head of zeros has any basis, its own among them.
    floor = torch.where(largest > 0, largest * _FLOOR, 1.0)
    root = values.maximum(floor).sqrt().unsqueeze(1)
    return vectors * root @ vectors.mT, vectors / root @ vectors.mT


def turned(weight: Tensor, basis: Tensor) -> Tensor:
    """Return a projection, or its bias, whose result is in a basis.

    Args:
        weight: (H * D, K) or (H * D,), of any float dtype.
        basis: (H, D, D), as ``Basis.query``.

    Returns:
        float64, of the same shape.

    Raises:
        ShapeError: the rows are not those of the heads.
    """
    heads, columns = basis.shape[:2]
    if weight.shape[0] != heads * columns:
        raise ShapeError(f"{weight.shape[0]} rows, wanted {heads} heads of {columns} columns")
    by_head = weight.double().reshape(heads, columns, -1)
    return (basis.mT @ by_head).reshape(weight.shape)


def ranks_of(columns: int) -> tuple[int, ...]:
    """Return how many columns may be multiplied instead of all of a head's, ascending.

    They are half and three quarters, up to what a matrix instruction takes at once.
    """
    found = {padded(int(columns * part)) for part in _PARTS}
    return tuple(sorted(rank for rank in found if rank < columns))


def is_rank(rank: int) -> bool:
    """Tell whether matrix instructions multiply so many columns."""
    return rank > 0 and rank % COLUMNS == 0


def largest_two_of_four(k: Tensor) -> Tensor:
    """Return keys with zeros but for the largest two of every four columns, by token.

    Four columns are a quarter of the head apart: of neighbours in the basis all would be large, or
    none.

    Args:
        k: (..., D) of any float dtype, D a multiple of 4, in a basis; the mean taken off.
    """
    return torch.where(_largest(k.abs(), k.shape[-1]), k, torch.zeros_like(k))


def two_of_four_codes(codes: Tensor, qk_format: str, columns: int) -> Tensor:
    """Return codes of keys with zeros but for the largest two of every four columns, by token.

    Args:
        codes: (N, K, D) uint8; NaN is larger than any number.
        qk_format: e4m3fn or int8.
        columns: of a head, a multiple of 4; those behind them are zero.
    """
    # Without its sign, a larger code of e4m3fn is a larger number.
    integers = qk_format == INT8.name
    size = codes.view(torch.int8).short().abs() if integers else (codes & 0x7F).short()
    return torch.where(_largest(size, columns), codes, torch.zeros_like(codes))


def _largest(size: Tensor, columns: int) -> Tensor:
    """Return which are the larger two of columns c, c + D / 4, c + D / 2 and c + 3 D / 4."""
    if columns % TWO_OF_FOUR.m:
        raise ShapeError(f"heads of {columns} columns, wanted a multiple of {TWO_OF_FOUR.m}")
    quarters = size[..., :columns].reshape(*size.shape[:-1], TWO_OF_FOUR.m, -1)
    kept = choose_mask(quarters.mT, TWO_OF_FOUR).mT.flatten(-2)
    return pad(kept, (0, size.shape[-1] - columns))


def with_rank(codes: Tensor, rank: int | None) -> Tensor:
    """Return codes of queries whose columns from ``rank`` on are zero; None: as they are."""
    if rank is None:
        return codes
    counts = torch.arange(codes.shape[-1], device=codes.device) < rank
    return torch.where(counts, codes, torch.zeros_like(codes))
