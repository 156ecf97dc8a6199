"""Norms with their sums in the order of the kernels, so that results are theirs to the bit.

Sums of many numbers are merged from moments (count, mean, squared distances from the mean): a sum
of squares would lose what stands behind a large mean.
"""

from typing import NamedTuple

import torch
from torch import Tensor

#: Pixels whose moments are found at once, the waves that share them, and threads that merge them.
CHUNK, WAVES, LANES = 64, 8, 32
_RUN = 8


class Moments(NamedTuple):
    """Of numbers that were seen: how many, their mean; tensors of one shape."""

    number: Tensor
    mean: Tensor
    #: sum of squared distances from the mean
    squares: Tensor

    def merge(self, other: "Moments") -> "Moments":
        """Return those of both; Chan, Golub, LeVeque 1979."""
        number = self.number + other.number
        apart, share = other.mean - self.mean, other.number / number
        mean = self.mean + apart * share
        squares = self.squares + other.squares + apart * apart * (self.number * share)
        seen = other.number > 0
        return Moments(
            torch.where(seen, number, self.number),
            torch.where(seen, mean, self.mean),
            torch.where(seen, squares, self.squares),
        )

    def last(self, part: slice) -> "Moments":
        """Return a part of the last axis."""
        return Moments(*(t[..., part] for t in self))


def _merged(moments: Moments, axis: int) -> Moments:
    """Merge along an axis, one after another."""
    parts = [Moments(*found) for found in zip(*(t.unbind(axis) for t in moments), strict=True)]
    found = parts[0]
    for part in parts[1:]:
        found = found.merge(part)
    return found


def partial_moments(x: Tensor) -> Tensor:
    """Return mean and squared distances from it of each chunk of pixels, by channel.

    Args:
        x: (B, T, C) float32.

    Returns:
        (B, ceil(T / 64), C, 2) float32.
    """
    batch, pixels, channels = x.shape
    chunks = -(-pixels // CHUNK)
    padded = x.new_zeros(batch, chunks * CHUNK, channels)
    padded[:, :pixels] = x
    turns = padded.reshape(batch, chunks, CHUNK // WAVES, WAVES, channels)
    there = torch.arange(chunks * CHUNK, device=x.device).reshape(chunks, -1, WAVES, 1) < pixels
    zeros = torch.zeros_like(turns[:, :, 0])
    count, mean, squares = zeros, zeros, zeros
    for turn in range(CHUNK // WAVES):
        values, seen = turns[:, :, turn], there[:, turn]
        apart = values - mean
        # By a reciprocal, as the kernel.
        nearer = mean + apart * (torch.ones_like(mean) / (turn + 1))
        squares = torch.where(seen, squares + apart * (values - nearer), squares)
        mean = torch.where(seen, nearer, mean)
        count = count + seen
    found = _merged(Moments(count, mean, squares), axis=2)
    return torch.stack([found.mean, found.squares], dim=-1)


def group_moments(partials: Tensor, pixels: int, groups: int, eps: float) -> Tensor:
    """Return mean and 1 / sqrt(variance + eps) of groups of channels.

    Args:
        partials: of ``partial_moments``.
        pixels: T.
        groups: G, of C / G channels.
        eps: added to variances, rounded to float32.

    Returns:
        (B, G, 2) float32.
    """
    batch, chunks, channels, _ = partials.shape
    left = pixels - CHUNK * torch.arange(chunks, device=partials.device)
    counts = left.clamp(max=CHUNK).float().reshape(1, chunks, 1, 1)
    split = partials.reshape(batch, chunks, groups, channels // groups, 2)
    entries = split.transpose(1, 2).flatten(2, 3)
    counts = counts.expand(batch, chunks, groups, channels // groups).transpose(1, 2).flatten(2, 3)
    threads = WAVES * LANES
    short = -entries.shape[2] % threads
    entries = torch.nn.functional.pad(entries, (0, 0, 0, short))
    counts = torch.nn.functional.pad(counts, (0, short))
    whole = Moments(counts, entries[..., 0], entries[..., 1])
    own = _merged(Moments(*(t.reshape(batch, groups, -1, threads) for t in whole)), axis=2)
    lanes = Moments(*(t.reshape(batch, groups, WAVES, LANES) for t in own))
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes.last(slice(width)).merge(lanes.last(slice(width, 2 * width)))
    found = _merged(Moments(*(t[..., 0] for t in lanes)), axis=2)
    variance = found.squares / found.number
    return torch.stack([found.mean, _inverse_root(variance, eps)], dim=-1)


def row_sums(values: Tensor) -> Tensor:
    """Return the sums of rows (M, K) float32, K a multiple of 8: (M, 1).

    Runs of 8 as a tree, the runs of a lane in order, lanes as a tree.
    """
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % (LANES * _RUN)))
    runs = _tree(padded.reshape(rows, -1, LANES, _RUN))
    lanes = torch.zeros_like(runs[:, 0])
    for step in range(-(-columns // (LANES * _RUN))):
        lanes = lanes + runs[:, step]
    return _tree(lanes).reshape(rows, 1)


def _tree(values: Tensor) -> Tensor:
    """Return sums along the last axis, whose length is a power of two."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def layer_norm(x: Tensor, *, centred: bool, eps: float) -> Tensor:
    """Return rows (M, K) float32 less their mean where ``centred``, divided by what is left."""
    columns = torch.full((len(x), 1), x.shape[1], dtype=torch.float32, device=x.device)
    mean = row_sums(x) / columns if centred else torch.zeros_like(columns)
    apart = x - mean
    variance = row_sums(apart * apart) / columns
    return apart * _inverse_root(variance, eps)


def _inverse_root(variance: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(variance + eps), each step the nearest float32."""
    total = variance + torch.full_like(variance, eps)
    # By float64: torch's own root of float32 is a last place off for every fifth number on a CPU.
    root = total.double().sqrt().float()
    return torch.ones_like(root) / root
