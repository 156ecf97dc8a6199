"""The packed 2:4 layout: kept codes in index order, and one nibble of positions per group of four.

Bits 1:0 and 3:2 of a nibble are the two kept positions, ascending and distinct; the low nibble of a
byte belongs to the lower group. The matrix instructions of RDNA4 and of NVIDIA read exactly this.
"""

import torch
from torch import Tensor

from quantkit.errors import ShapeError

#: Every pair of ascending, distinct positions: first | second << 2.
LEGAL_NIBBLES = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)


def to_rows(weight: Tensor) -> Tensor:
    """Return a weight as the kernels read it: rows of N, K contiguous.

    Args:
        weight: Linear (N, K), or Conv2d (N, C, kh, kw).

    Returns:
        (N, K) with K = kh * kw * C for convolutions, channels last.
    """
    if weight.ndim == 4:
        return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
    return weight


def from_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return (N, K) rows as a module's weight of ``shape``, Linear or Conv2d (N, C, kh, kw)."""
    if len(shape) == 4:
        n, c, kh, kw = shape
        return rows.reshape(n, kh, kw, c).permute(0, 3, 1, 2)
    return rows.reshape(shape)


def pack_two_of_four(codes: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the masked codes and name their positions.

    Args:
        codes: (N, K) uint8 (view FP8 as uint8), K a multiple of 8.
        mask: (N, K) bool with exactly two True in every group of four.

    Returns:
        values (N, K / 2) uint8, and metadata (N, K / 8) uint8.

    Raises:
        ShapeError: K is not a multiple of 8, or a group does not keep exactly two.
    """
    k = codes.shape[1]
    if k % 8:
        raise ShapeError(f"K {k} is not a multiple of 8, which packed 2:4 metadata needs")
    # A group is one 32-bit word: shifts and masks run at vector speed, 9 times faster than picking
    # bytes with where().
    kept, word = _words(mask), _words(codes)
    # The product's top byte is the sum of the word's four bytes.
    if not bool(((kept * 0x01010101) >> 24 == 2).all()):
        raise ShapeError("the mask does not keep exactly two of every four; choose it again")
    m0, m1, m2, m3 = kept & 1, (kept >> 8) & 1, (kept >> 16) & 1, kept >> 24
    low, high = (1 - m0) * (2 - m1), 1 + m2 + m3 * (2 - m2)
    pair = ((word >> (low * 8)) & 0xFF) | (((word >> (high * 8)) & 0xFF) << 8)
    values = pair.to(torch.int16).view(torch.uint8)
    # Two nibbles, 32 bits apart: the upper one moves next to the lower one.
    nibbles = (low | (high << 2)).view(torch.int64)
    return values, (nibbles | (nibbles >> 28)).to(torch.uint8)


def _words(rows: Tensor) -> Tensor:
    """Return (N, K) bytes as (N, K / 4) little-endian words."""
    rows = rows.contiguous()
    return (rows.clone() if rows.storage_offset() % 4 else rows).view(torch.int32)


def unpack_positions(meta: Tensor) -> Tensor:
    """Return the kept positions inside their groups.

    Args:
        meta: (N, K / 8) uint8.

    Returns:
        (N, K / 4, 2) int64, each 0 to 3.
    """
    n = meta.shape[0]
    nibbles = torch.stack((meta & 0xF, meta >> 4), dim=-1).reshape(n, -1)
    return torch.stack((nibbles & 3, nibbles >> 2), dim=-1).long()


def unpack_two_of_four(values: Tensor, meta: Tensor) -> Tensor:
    """Return the dense codes, zero where nothing was kept.

    Args:
        values: (N, K / 2) any dtype.
        meta: (N, K / 8) uint8 with legal nibbles.

    Returns:
        (N, K), the dtype of ``values``.
    """
    n, half = values.shape
    dense = torch.zeros(n, half // 2, 4, dtype=values.dtype, device=values.device)
    dense.scatter_(2, unpack_positions(meta), values.reshape(n, half // 2, 2))
    return dense.reshape(n, half * 2)


def metadata_is_legal(meta: Tensor) -> bool:
    """Tell whether every nibble names two distinct, ascending positions."""
    legal = torch.zeros(16, dtype=torch.bool)
    legal[list(LEGAL_NIBBLES)] = True
    both = legal.repeat(16) & legal.repeat_interleave(16)
    present = torch.bincount(meta.flatten().int(), minlength=256) > 0
    return not bool((present & ~both).any())
