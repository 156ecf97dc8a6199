"""Moments of pictures, their sums in the order of the kernels: results are theirs to the bit.

Squares are those of distances from the mean, or from one of the numbers: a sum of plain squares
would lose the digits below a large mean.
"""

import torch
from torch import Tensor

#: Values that a lane loads at once; lanes of a wave.
_RUN, LANES = 8, 32
#: Chunks of a picture at most, whose pixels are a multiple; threads of a block, and channels that
#: these take.
CHUNKS, _UNIT, SLAB_THREADS = 128, 16, 512
MAX_CHANNELS = SLAB_THREADS * _RUN


def chunk_pixels(pixels: int) -> int:
    """Return the number of pixels of every chunk but the last one."""
    return -(-pixels // (CHUNKS * _UNIT)) * _UNIT


def partial_moments(x: Tensor, groups: int) -> Tensor:
    """Return mean and squared distances from it of each chunk of pixels, by group of channels.

    Args:
        x: (B, T, C) float32.
        groups: G, of C / G channels.

    Returns:
        (B, G, chunks, 2) float32.
    """
    turns, seen = _turns(x)
    number, mean, squares = _thread_moments(turns, seen)
    batch, chunks, slots, channels = mean.shape
    split = (batch, chunks, slots, groups, channels // groups)
    means, squares = mean.reshape(split), squares.reshape(split)
    origin = means[:, :, :1, :, :1]
    number = number.reshape(1, chunks, slots, 1, 1)
    whole = number.sum(2, keepdim=True) * split[-1]
    share = torch.ones_like(whole) / whole
    found = origin + _by_lanes(number * (means - origin), groups) * share
    apart = means - found
    squares = _by_lanes(squares + number * (apart * apart), groups)
    pair = torch.stack([found, squares], dim=-1)[:, :, 0, :, 0]
    return pair.transpose(1, 2).contiguous()


def _turns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return pixels by chunk, turn and slot, and which of them there are."""
    batch, pixels, channels = x.shape
    whole, slots = chunk_pixels(pixels), SLAB_THREADS * _RUN // channels
    short = torch.nn.functional.pad(x, (0, 0, 0, -pixels % whole))
    split = short.reshape(batch, -1, whole, channels)
    split = torch.nn.functional.pad(split, (0, 0, 0, -whole % slots))
    shape = (split.shape[1], -1, slots, 1)
    place = torch.arange(split.shape[2], device=x.device).reshape(1, *shape[1:])
    left = pixels - whole * torch.arange(shape[0], device=x.device).reshape(-1, 1, 1, 1)
    return split.reshape(batch, *shape[:-1], channels), place < left.clamp(max=whole)


def _thread_moments(turns: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many pixels a slot has, their mean and squares by channel."""
    first = turns[:, :, 0]
    sums = squares = torch.zeros_like(first)
    for turn in range(turns.shape[2]):
        apart = turns[:, :, turn] - first
        sums = torch.where(seen[:, turn], sums + apart, sums)
        squares = torch.where(seen[:, turn], fused(apart, apart, squares), squares)
    number = seen.sum(1).float()
    share = torch.where(number > 0, torch.ones_like(number) / number, number)
    mean = sums * share
    return number, first + mean, squares - sums * mean


def _by_lanes(values: Tensor, groups: int) -> Tensor:
    """Return sums over slots and a group's channels, (B, chunks, slots, G, width), kept as axes."""
    lanes = group_lanes(groups)
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % lanes))
    rounds = padded.reshape(*values.shape[:-1], -1, lanes)
    own = torch.zeros_like(rounds[:, :, 0, :, 0])
    for slot in range(rounds.shape[2]):
        for index in range(rounds.shape[4]):
            own = own + rounds[:, :, slot, :, index]
    return _tree(own)[:, :, None, :, None]


def group_lanes(groups: int) -> int:
    """Return how many lanes share a group."""
    lanes = LANES
    while lanes > 1 and lanes * groups > SLAB_THREADS:
        lanes //= 2
    return lanes


def group_moments(partials: Tensor, pixels: int, channels: int, eps: float) -> Tensor:
    """Return mean and 1 / sqrt(variance + eps) of groups of channels.

    Args:
        partials: of ``partial_moments``.
        pixels: T.
        channels: C.
        eps: added to variances, rounded to float32.

    Returns:
        (B, G, 2) float32.
    """
    groups, chunks = partials.shape[1:3]
    left = pixels - chunk_pixels(pixels) * torch.arange(chunks, device=partials.device)
    number = left.clamp(max=chunk_pixels(pixels)).float() * (channels // groups)
    means, squares = partials.unbind(-1)
    whole = torch.full_like(means[..., 0], pixels) * (channels // groups)
    share = torch.ones_like(whole) / whole
    mean = means[..., 0] + _in_turn(number * (means - means[..., :1]), groups) * share
    apart = means - mean.unsqueeze(-1)
    variance = _in_turn(squares + number * (apart * apart), groups) * share
    return torch.stack([mean, _inverse_root(variance, eps)], dim=-1)


def _in_turn(values: Tensor, groups: int) -> Tensor:
    """Return sums of (B, G, chunks): lanes take them in turn, then add up as a tree."""
    lanes = group_lanes(groups)
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % lanes))
    rounds = padded.reshape(*values.shape[:-1], -1, lanes)
    own = torch.zeros_like(rounds[..., 0, :])
    for index in range(rounds.shape[-2]):
        own = own + rounds[..., index, :]
    return _tree(own)


def _tree(values: Tensor) -> Tensor:
    """Return sums along the last axis, whose length is a power of two."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def scaled(y: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y * factor + bias, rounded once where there are both."""
    if factor is None:
        return y if bias is None else y + bias.float()
    # The kernels add +0 where there is no bias, which makes +0 of -0.
    return y * factor.float() + 0.0 if bias is None else fused(y, factor.float(), bias.float())


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32, rounded once.

    In float64 the product is exact, and so is what the sum loses; with that in the sum's last bit,
    rounding to float32 is right (Boldo and Melquiond 2008).
    """
    product, other = a.double() * b.double(), c.double()
    total = product + other
    back = total - product
    lost = (product - (total - back)) + (other - back)
    even = total.view(torch.int64) & 1 == 0
    odd = total.nextafter(torch.copysign(torch.full_like(total, torch.inf), lost))
    return torch.where(lost.isfinite() & (lost != 0) & even, odd, total).float()


def _inverse_root(variance: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(variance + eps), each step the nearest float32."""
    total = variance + torch.full_like(variance, eps)
    # By float64: torch's own root of float32 is a last place off for every fifth number on a CPU.
    root = total.double().sqrt().float()
    return torch.ones_like(root) / root
