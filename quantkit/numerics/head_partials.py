"""Sums and ranges of heads by chunk of tokens, for dynamic scales, in the order of the kernels."""

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Tokens that a block reads at a time; chunks of a picture at most, whose tokens are a multiple.
_SLOTS, _UNIT, CHUNKS = 8, 32, 32
#: Columns of a run, which share a largest magnitude.
RUN = 8
#: Of each column: sum, smallest, largest.
NUMBERS = 3


def chunk_tokens(tokens: int) -> int:
    """Return the number of tokens of every chunk but the last one."""
    return -(-tokens // (_UNIT * CHUNKS)) * _UNIT


def chunk_count(tokens: int) -> int:
    """Return how many chunks there are; of no tokens none."""
    return -(-tokens // chunk_tokens(tokens)) if tokens else 0


def largest_partials(x: Tensor, tokens: int) -> Tensor:
    """Return the largest magnitude of each run of columns, by chunk; NaN where one is.

    Args:
        x: (N, T, D) float32.
        tokens: that chunks are cut by, T or more.

    Returns:
        (N, chunks, D / 8) float32, 0 of chunks without tokens.
    """
    amax = _chunks(x.abs(), tokens, 0).amax(dim=(2, 3))
    return amax.reshape(*amax.shape[:2], -1, RUN).amax(dim=-1)


def column_partials(x: Tensor, tokens: int) -> Tensor:
    """Return sum, smallest and largest number of each column, by chunk.

    Args:
        x: (N, T, D) float32.
        tokens: that chunks are cut by, T or more.

    Returns:
        (N, chunks, 3, D) float32; 0, inf and -inf of chunks without tokens. NaN makes sums NaN and
        is no smallest or largest number.
    """
    low = _chunks(x.where(~x.isnan(), x.new_tensor(torch.inf)), tokens, torch.inf)
    high = _chunks(x.where(~x.isnan(), x.new_tensor(-torch.inf)), tokens, -torch.inf)
    sums = sum_in_turn(sum_in_turn(_chunks(x, tokens, 0), 2), 2)
    return torch.stack([sums, low.amin(dim=(2, 3)), high.amax(dim=(2, 3))], dim=2)


def merged_columns(partials: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums, smallest and largest numbers of (N, D) from (N, chunks, 3, D)."""
    sums, low, high = partials.unbind(dim=2)
    filled = pad(sums, (0, 0, 0, -sums.shape[1] % _SLOTS))
    turns = filled.reshape(len(sums), -1, _SLOTS, sums.shape[-1])
    return sum_in_turn(sum_in_turn(turns, 1), 1), low.amin(dim=1), high.amax(dim=1)


def sum_in_turn(t: Tensor, axis: int) -> Tensor:
    """Return sums along an axis, one number after another."""
    total = torch.zeros_like(t.select(axis, 0))
    for part in t.unbind(axis):
        total = total + part
    return total


def _chunks(x: Tensor, tokens: int, value: float) -> Tensor:
    """Return (N, chunks, turns, slots, D), filled up with a value."""
    rows, chunks = chunk_tokens(tokens), chunk_count(tokens)
    filled = pad(x, (0, 0, 0, rows * chunks - x.shape[1]), value=value)
    return filled.reshape(len(x), chunks, -1, _SLOTS, x.shape[-1])
