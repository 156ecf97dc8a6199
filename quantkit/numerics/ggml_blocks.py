"""Splitting GGML's blocks Q4_0 and Q8_0 into codes and scales, and joining them again.

A block holds 32 weights of a row: a float16 scale d, then 16 bytes of nibbles (Q4_0, in the order
of ``nibbles``) or 32 int8 codes (Q8_0). quantkit keeps the same bytes in two tensors: nothing is
computed, so that both ways are exact for every content, NaN and negative scales included.
"""

import torch
from torch import Tensor

from quantkit.numerics.formats import NumberFormat

#: Bytes of d, which stands first.
_SCALE_BYTES = 2


def block_bytes(fmt: NumberFormat) -> int:
    """Return the size of a block: 18 for q4_0, 34 for q8_0."""
    return _SCALE_BYTES + fmt.block // fmt.codes_per_byte


def split_blocks(blocks: Tensor, fmt: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of rows of blocks.

    Args:
        blocks: (R, K / 32 * size of a block) uint8.
        fmt: q4_0 or q8_0.

    Returns:
        as FORMAT.md stores them: (R, K / 2) uint8 or (R, K) int8; (R, K / 32) float16.
    """
    rows = len(blocks)
    parts = blocks.reshape(-1, block_bytes(fmt))
    scale = parts[:, :_SCALE_BYTES].contiguous().view(torch.float16).reshape(rows, -1)
    codes = parts[:, _SCALE_BYTES:].reshape(rows, -1)
    return codes.view(torch.int8) if fmt.codes_per_byte == 1 else codes, scale


def join_blocks(codes: Tensor, scale: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the blocks (R, bytes) uint8 of codes and scales, the inverse of ``split_blocks``."""
    rows = len(codes)
    first = scale.contiguous().view(torch.uint8).reshape(-1, _SCALE_BYTES)
    rest = codes.contiguous().view(torch.uint8).reshape(len(first), -1)
    assert rest.shape[1] == block_bytes(fmt) - _SCALE_BYTES
    return torch.cat((first, rest), dim=1).reshape(rows, -1)
