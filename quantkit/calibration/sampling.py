"""A uniform random sample of the rows that a layer reads, the same however the work is divided.

Every row has a priority, uniform in (0, 1) and a function of its image's noise seed, the call and
its index alone; the rows of the largest priorities stay. So samples of parts merge exactly. Which
rows those are is drawn on the host, before they are computed: the device is never waited for.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

#: Rows kept per layer and timestep bucket.
SAMPLE_ROWS = 32

#: Most images per prompt in a batch, as guidance makes two: more are tokens folded into the batch.
_MOST_PARTS = 8


@dataclass(frozen=True, eq=False)
class Candidates:
    """The rows of one call that can stay, the largest priority first."""

    #: float64 (n,), n at most SAMPLE_ROWS
    priority: NDArray[np.float64]
    #: int64 (n,), along the first axis of the input
    image: NDArray[np.int64]
    #: int64 (n,), among the rows of that image
    row: NDArray[np.int64]


@lru_cache(maxsize=64)
def draw_candidates(seeds: range, call: int, images: int, rows: int) -> Candidates:
    """Return the rows of a call whose priorities are largest.

    The k largest of n uniform numbers are drawn as such, without the others.

    Args:
        seeds: noise seeds of the prompts in the batch.
        call: how often the layer was called in this batch before.
        images: size of the input's first axis: the batch, once or more (guidance doubles it).
        rows: that each image has.

    Source: Renyi 1953, On the theory of order statistics: spacings of exponential numbers.
    """
    if images % len(seeds) or images > _MOST_PARTS * len(seeds):
        # Not one image after another: all of it counts as the first prompt's.
        whole = draw_candidates(seeds[:1], call, 1, images * rows)
        return Candidates(whole.priority, whole.row // rows, whole.row % rows)
    count = min(SAMPLE_ROWS, rows)
    priority, row = np.empty((images, count)), np.empty((images, count), np.int64)
    for image in range(images):
        part, prompt = divmod(image, len(seeds))
        random = np.random.default_rng((seeds[prompt], part, call))
        spacings = random.exponential(size=count) / (rows - np.arange(count))
        priority[image] = np.exp(-spacings.cumsum())
        row[image] = random.choice(rows, count, replace=False)
    order = np.argsort(-priority, axis=None, kind="stable")[:SAMPLE_ROWS]
    return Candidates(priority.flat[order], order // count, row.flat[order])


@dataclass(frozen=True, eq=False)
class Ranking:
    """The priorities of the rows that a bucket holds, and what the last call changed."""

    #: float64 (SAMPLE_ROWS,) by slot; 0 where no row is
    priority: NDArray[np.float64]
    #: slots that were filled, and with which rows of which images
    slots: NDArray[np.int64]
    image: NDArray[np.int64]
    row: NDArray[np.int64]


_NONE = np.empty(0, np.int64)
_EMPTY = Ranking(np.zeros(SAMPLE_ROWS), _NONE, _NONE, _NONE)


@lru_cache(maxsize=256)
def admit(before: Ranking, drawn: Candidates) -> Ranking:
    """Return who stays after a call. Layers of one shape see the same draws and share the answer.

    Args:
        before: of the bucket so far.
        drawn: of this call.
    """
    both = np.concatenate((before.priority, drawn.priority))
    stays = np.zeros(len(both), np.bool_)
    stays[np.argsort(-both, kind="stable")[:SAMPLE_ROWS]] = True
    # As many of the drawn rows come in as slots fall free.
    slots, new = np.flatnonzero(~stays[:SAMPLE_ROWS]), np.flatnonzero(stays[SAMPLE_ROWS:])
    priority = before.priority.copy()
    priority[slots] = drawn.priority[new]
    return Ranking(priority, slots, drawn.image[new], drawn.row[new])


class Reservoir:
    """The rows of one layer that stay, per timestep bucket, on the device."""

    def __init__(self, buckets: int, columns: int, device: torch.device) -> None:
        self.rows = torch.zeros(buckets, SAMPLE_ROWS, columns, dtype=torch.bfloat16, device=device)
        self._rankings = [_EMPTY] * buckets

    def offer(
        self,
        bucket: int,
        values: Tensor,
        module: nn.Module,
        drawn: Candidates,
        shared: dict[Ranking, Tensor],
    ) -> None:
        """Take in the rows of an input that belong to the largest so far.

        Args:
            bucket: of the timestep.
            values: what the module is called with.
            module: a Linear or a Conv2d.
            drawn: from ``draw_candidates``.
            shared: rows of this very input that other Linear layers took; taken ones are added.
        """
        now = self._rankings[bucket] = admit(self._rankings[bucket], drawn)
        if not len(now.slots):
            return
        taken = None if isinstance(module, nn.Conv2d) else shared.get(now)
        if taken is None:
            taken = rows_of_input(values, module, now.image, now.row).to(torch.bfloat16)
        if not isinstance(module, nn.Conv2d):
            shared[now] = taken
        self.rows[bucket].index_copy_(0, _slots_on(now, values.device), taken)

    def put(self, samples: Tensor, priority: Tensor) -> None:
        """Go on from what ``sorted`` returned."""
        self.rows.copy_(samples)
        self._rankings = [Ranking(row, _NONE, _NONE, _NONE) for row in priority.numpy()]

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Return samples (B, R, K) and their priorities (B, R), the largest first, on the CPU."""
        priority = np.stack([ranking.priority for ranking in self._rankings])
        return _sorted(self.rows.cpu(), torch.from_numpy(priority))


def join_samples(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the samples over all parts: those of the largest priorities.

    Args:
        parts: samples (B, R, K) and priorities (B, R) of each.
    """
    rows = torch.cat([rows for rows, _ in parts], dim=1)
    rows, priority = _sorted(rows, torch.cat([priority for _, priority in parts], dim=1))
    return rows[:, :SAMPLE_ROWS], priority[:, :SAMPLE_ROWS]


def row_count(values: Tensor, module: nn.Module) -> int:
    """Return how many rows the kernels read of each image (index of the first axis)."""
    if isinstance(module, nn.Conv2d):
        tall, wide = (len(_starts(values, module, axis)) for axis in (0, 1))
        return tall * wide
    return values[0].numel() // values.shape[-1]


def rows_of_input(
    values: Tensor, module: nn.Module, image: NDArray[np.int64], row: NDArray[np.int64]
) -> Tensor:
    """Return rows of an input as the kernels read them: of a convolution, its windows.

    Args:
        values: (B, ..., K), or (B, C, H, W) for a convolution, which pads with zeros.
        module: a Linear or a Conv2d.
        image: (n,), along the first axis.
        row: (n,), among the rows of that image.

    Returns:
        (n, K), for a convolution (n, kh * kw * C), channels last.
    """
    if not isinstance(module, nn.Conv2d):
        rows = values.reshape(-1, values.shape[-1])
        return rows[_on(image * (len(rows) // len(values)) + row, values)]
    ys, xs = (_starts(values, module, axis) for axis in (0, 1))
    y = _taps(ys[row // len(xs)], module, 0)
    x = _taps(xs[row % len(xs)], module, 1)
    height, width = values.shape[2:]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    windows = values[
        _on(image[:, None, None], values),
        :,
        _on(y.clip(0, height - 1)[:, :, None], values),
        _on(x.clip(0, width - 1)[:, None, :], values),
    ]
    if not inside.all():
        windows *= _on(inside[..., None], values)
    return windows.reshape(len(row), -1)


@lru_cache(maxsize=256)
def _slots_on(ranking: Ranking, device: torch.device) -> Tensor:
    """Return its slots, copied once for all layers that share it."""
    return torch.from_numpy(ranking.slots).to(device, non_blocking=True)


def _starts(values: Tensor, conv: nn.Conv2d, axis: int) -> NDArray[np.int64]:
    """Return where windows start along height (axis 0) or width (1); padding lies before 0."""
    # The only place where torch resolves padding="same": left, right, top, bottom.
    before, after = conv._reversed_padding_repeated_twice[2 - 2 * axis : 4 - 2 * axis]  # noqa: SLF001
    reach = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
    return np.arange(-before, values.shape[2 + axis] + after - reach, conv.stride[axis])


def _taps(starts: NDArray[np.int64], conv: nn.Conv2d, axis: int) -> NDArray[np.int64]:
    return starts[:, None] + conv.dilation[axis] * np.arange(conv.kernel_size[axis])


def _sorted(rows: Tensor, priority: Tensor) -> tuple[Tensor, Tensor]:
    priority, order = priority.sort(dim=1, descending=True, stable=True)
    return rows.gather(1, order.unsqueeze(2).expand_as(rows)), priority


def _on(array: NDArray[np.generic], values: Tensor) -> Tensor:
    """Return an array on the device of ``values``; a copy this small is not waited for."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(values.device, non_blocking=True)
