"""A uniform random sample of the rows that a layer reads, the same however the work is divided.

Every row has a priority, uniform in (0, 1) and a function of its image's noise seed, the call and
its index alone; the rows of the largest priorities stay. So samples of parts merge exactly. Which
rows those are is drawn on the host, before they are computed: the device is never waited for.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.calibration.statistics.fields import Merge, Tensors

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


def are_of_prompts(images: int, prompts: int) -> bool:
    """Tell whether images are a batch's prompts, once or more, one after another."""
    return images % prompts == 0 and images <= _MOST_PARTS * prompts


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
    if not are_of_prompts(images, len(seeds)):
        # Not one image after another: all of it counts as the first prompt's.
        whole = draw_candidates(seeds[:1], call, 1, images * rows)
        return Candidates(whole.priority, whole.row // rows, whole.row % rows)
    count = min(SAMPLE_ROWS, rows)
    spacings = _spacings(seeds, call, images)[:, :count] / (rows - np.arange(count))
    priority = np.exp(-spacings.cumsum(axis=1))
    order = np.argsort(-priority, axis=None, kind="stable")[:SAMPLE_ROWS]
    image, place = np.divmod(order, count)
    drawn = {i: _rows(_random(seeds, call, i), count, rows) for i in dict.fromkeys(image.tolist())}
    row = [drawn[i][at] for i, at in zip(image.tolist(), place.tolist(), strict=True)]
    return Candidates(priority.flat[order], image, np.array(row, np.int64))


@lru_cache(maxsize=64)
def _spacings(seeds: range, call: int, images: int) -> NDArray[np.float64]:
    """Return the first numbers of every image's generator, which inputs of all sizes share."""
    found = [_random(seeds, call, image).exponential(size=SAMPLE_ROWS) for image in range(images)]
    return np.stack(found)


def _rows(random: np.random.Generator, count: int, rows: int) -> NDArray[np.int64]:
    """Return so many different rows, which an image's generator gives after its spacings."""
    random.exponential(size=count)
    found: NDArray[np.int64] = random.choice(rows, count, replace=False)
    return found


def _random(seeds: range, call: int, image: int) -> np.random.Generator:
    part, prompt = divmod(image, len(seeds))
    return np.random.default_rng((seeds[prompt], part, call))


@dataclass(frozen=True, eq=False)
class Ranking:
    """The priorities of the rows that a bucket holds, and what the last call changed."""

    #: float64 (SAMPLE_ROWS,) by slot; 0 where no row is
    priority: NDArray[np.float64]
    #: slots that were filled, with which of the drawn rows, and of which images those are
    slots: NDArray[np.int64]
    chosen: NDArray[np.int64]
    image: NDArray[np.int64]
    row: NDArray[np.int64]


_NONE = np.empty(0, np.int64)


def _held(priority: NDArray[np.float64]) -> Ranking:
    return Ranking(priority, _NONE, _NONE, _NONE, _NONE)


_EMPTY = _held(np.zeros(SAMPLE_ROWS))


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
    return Ranking(priority, slots, new, drawn.image[new], drawn.row[new])


class Reservoir:
    """The rows of one layer that stay, per timestep bucket, on the device."""

    def __init__(self, buckets: int, columns: int, device: torch.device) -> None:
        count = buckets * SAMPLE_ROWS
        #: and one more, for rows of recorded calls that do not stay
        self._store = torch.zeros(count + 1, columns, dtype=torch.bfloat16, device=device)
        self.rows = self._store[:count].view(buckets, SAMPLE_ROWS, columns)
        self._rankings = [_EMPTY] * buckets

    def offer(
        self,
        bucket: int,
        values: Tensor,
        module: nn.Module,
        drawn: Candidates,
        shared: dict[object, Tensor],
    ) -> None:
        """Take in the rows of an input that belong to the largest so far.

        Args:
            bucket: of the timestep.
            values: what the module is called with.
            module: a Linear or a Conv2d.
            drawn: from ``draw_candidates``.
            shared: rows of this very input that other Linear layers took; taken ones are added.
        """
        now = self.admit(bucket, drawn)
        if not len(now.slots):
            return
        taken = None if isinstance(module, nn.Conv2d) else shared.get(now)
        if taken is None:
            taken = rows_of_input(values, module, now).to(torch.bfloat16)
        if not isinstance(module, nn.Conv2d):
            shared[now] = taken
        self.rows[bucket].index_copy_(0, _slots_on(now, values.device), taken)

    def admit(self, bucket: int, drawn: Candidates) -> Ranking:
        """Let the rows of a call in that belong to the largest so far, before they are there."""
        self._rankings[bucket] = admit(self._rankings[bucket], drawn)
        return self._rankings[bucket]

    def write(self, rows: Tensor, places: Tensor) -> None:
        """Write drawn rows (n, K) of a recorded call to ``places``, int64 (n,), of the store.

        Those are of all buckets' slots, and after them that of rows that do not stay.
        """
        self._store.index_copy_(0, places, rows)

    def put(self, samples: Tensor, priority: Tensor) -> None:
        """Go on from what ``sorted`` returned."""
        self.rows.copy_(samples)
        self._rankings = [_held(row) for row in priority.numpy()]

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Return samples (B, R, K) and their priorities (B, R), the largest first, on the CPU."""
        priority = np.stack([ranking.priority for ranking in self._rankings])
        return _sorted(self.rows.cpu(), torch.from_numpy(priority))


def _largest_priorities(rows: Tensor, priority: Tensor) -> Tensor:
    """Return the rows of the largest priorities among those of several buckets.

    Args:
        rows: (n, R, ...) of n buckets.
        priority: (n, R).
    """
    return _sorted(rows.flatten(0, 1).unsqueeze(0), priority.flatten().unsqueeze(0))[0][0]


def _held_rows(priority: Tensor) -> Tensor:
    return (priority > 0).sum(dim=-1)


#: Of rows, of their priorities, and of how many there are.
SAMPLES = Merge(_largest_priorities, "sample_priority")
PRIORITIES = Merge(_largest_priorities)
SAMPLE_COUNT = Merge(
    lambda _, priority: _held_rows(priority).sum().clamp(max=SAMPLE_ROWS), "sample_priority"
)


def count_samples(sums: Tensors) -> Tensor:
    """Return how many rows each bucket has, int64 (B,)."""
    return _held_rows(sums["sample_priority"])


def refuse_more_samples(tensors: Tensors) -> str:
    """Return what is wrong with a number of rows; empty: nothing."""
    more = bool((tensors["sample_count"] > SAMPLE_ROWS).any())
    return f"above {SAMPLE_ROWS}" if more else ""


def rows_on_device(values: Tensor, module: nn.Module, image: Tensor, row: Tensor) -> Tensor:
    """Return what ``rows_of_input`` does of rows that only the device knows, int64 (n,) each."""
    if not isinstance(module, nn.Conv2d):
        rows = values.reshape(-1, values.shape[-1])
        return rows[image * (len(rows) // len(values)) + row]
    tall, wide = _lattice(values, module)
    across = len(wide.starts)
    y, above = tall.places_of(row // across)
    x, across_inside = wide.places_of(row % across)
    windows = values[image[:, None, None], :, y[:, :, None], x[:, None, :]]
    windows *= (above[:, :, None] & across_inside[:, None, :]).unsqueeze(3)
    return windows.reshape(len(row), -1)


def row_count(values: Tensor, module: nn.Module) -> int:
    """Return how many rows the kernels read of each image (index of the first axis)."""
    if isinstance(module, nn.Conv2d):
        return _window_count(_lattice(values, module))
    return values[0].numel() // values.shape[-1]


def rows_of_input(values: Tensor, module: nn.Module, which: Candidates | Ranking) -> Tensor:
    """Return rows of an input as the kernels read them: of a convolution, its windows.

    Args:
        values: (B, ..., K), or (B, C, H, W) for a convolution, which pads with zeros.
        module: a Linear or a Conv2d.
        which: image (n,), along the first axis, and row (n,), among the rows of that image.

    Returns:
        (n, K), for a convolution (n, kh * kw * C), channels last.
    """
    if not isinstance(module, nn.Conv2d):
        rows = values.reshape(-1, values.shape[-1])
        return rows[_rows_on(which, len(rows) // len(values), values.device)]
    image, y, x, inside = _taps_on(which, _lattice(values, module), values.device)
    windows = values[image, :, y, x]
    if inside is not None:
        windows *= inside
    return windows.reshape(len(which.row), -1)


class Axis(NamedTuple):
    """Windows along one axis of a picture."""

    #: pixels, and padding before and after them
    size: int
    before: int
    after: int
    stride: int
    taps: int
    dilation: int

    @property
    def starts(self) -> NDArray[np.int64]:
        """Starts of windows; padding lies before 0."""
        reach = self.dilation * (self.taps - 1)
        return np.arange(-self.before, self.size + self.after - reach, self.stride)

    def places(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the pixels of windows (n, taps), and which of them are not padding."""
        found = starts[:, None] + self.dilation * np.arange(self.taps)
        return found.clip(0, self.size - 1), (found >= 0) & (found < self.size)

    def places_of(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same on a device, of windows by their numbers, (n,)."""
        taps = self.dilation * torch.arange(self.taps, device=windows.device)
        found = (windows * self.stride - self.before).unsqueeze(1) + taps
        return found.clamp(0, self.size - 1), (found >= 0) & (found < self.size)


def _lattice(values: Tensor, conv: nn.Conv2d) -> tuple[Axis, Axis]:
    # The only place where torch resolves padding="same": left, right, top, bottom.
    left, right, top, bottom = conv._reversed_padding_repeated_twice  # noqa: SLF001
    (height, width), (down, across) = values.shape[2:], conv.stride
    (tall, wide), (tall_step, wide_step) = conv.kernel_size, conv.dilation
    return (
        Axis(height, top, bottom, down, tall, tall_step),
        Axis(width, left, right, across, wide, wide_step),
    )


@lru_cache(maxsize=256)
def _window_count(lattice: tuple[Axis, Axis]) -> int:
    tall, wide = lattice
    return len(tall.starts) * len(wide.starts)


@lru_cache(maxsize=256)
def _rows_on(which: Candidates | Ranking, rows: int, device: torch.device) -> Tensor:
    """Return where rows stand among those of all images, copied once for layers of one shape."""
    return _on(which.image * rows + which.row, device)


@lru_cache(maxsize=256)
def _taps_on(
    which: Candidates | Ranking, lattice: tuple[Axis, Axis], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return image, y and x of the taps of windows, and which are inside; None: all are."""
    tall, wide = lattice
    ys, xs = tall.starts, wide.starts
    y, above = tall.places(ys[which.row // len(xs)])
    x, across_inside = wide.places(xs[which.row % len(xs)])
    inside = above[:, :, None] & across_inside[:, None, :]
    places = (which.image[:, None, None], y[:, :, None], x[:, None, :])
    image, rows, columns = (_on(array, device) for array in places)
    return image, rows, columns, None if inside.all() else _on(inside[..., None], device)


@lru_cache(maxsize=256)
def _slots_on(ranking: Ranking, device: torch.device) -> Tensor:
    """Return its slots, copied once for all layers that share it."""
    return _on(ranking.slots, device)


def _sorted(rows: Tensor, priority: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the largest priorities, SAMPLE_ROWS at most, and these."""
    priority, order = priority.sort(dim=1, descending=True, stable=True)
    order = order[:, :SAMPLE_ROWS]
    # Whole rows: gather takes a number at a time.
    return rows[torch.arange(len(rows)).unsqueeze(1), order], priority[:, :SAMPLE_ROWS]


def _on(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array on a device; a copy this small is not waited for."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
