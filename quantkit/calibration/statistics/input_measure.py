"""Sums over one input, in one pass: by a kernel, by the compiled core on a CPU.

Where there is neither, PyTorch does it in a dozen passes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from quantkit.device.backends import Backend, forced
from quantkit.device.choosing import choose
from quantkit.device.host import observer
from quantkit.device.ops.call import call
from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import OPS
from quantkit.numerics.histogram import BINS, count_bins

#: Blocks that a GPU is given at once: some for each of its units, whose sums are added then.
_BLOCKS = 512
#: Rows of a block, and its channels.
_LEAST_ROWS, _SLAB = 32, 256
#: Of the second dimension of a launch.
_MOST_PICTURES = 65535


@dataclass(frozen=True, eq=False)
class Measured:
    """Of one input, by channel, on its device."""

    #: float32 (C,), largest |x|; NaN or Inf where the input holds such
    amax: Tensor
    #: float64 (2, C), sum of x, and of x**2
    sums: Tensor
    #: float64 (BINS,), of |x|
    histogram: Tensor
    #: values of a channel
    count: int
    #: float32 (B,), largest |x| of each image, where that is asked for
    peaks: Tensor | None = None


def measure(values: Tensor, channel_axis: int, *, peaks: bool = False) -> Measured:
    """Return what statistics are made of, without waiting for the device.

    Args:
        values: of any float dtype; (..., C), or with channels at another axis.
        channel_axis: that of the channels.
        peaks: those of images, along the first axis, are asked for.
    """
    axis = channel_axis % values.ndim
    found = _measured(values, axis, _layout(values, axis), images=len(values) if peaks else 1)
    if not peaks or found.peaks is not None:
        return found
    others = tuple(range(1, values.ndim))
    largest = torch.linalg.vector_norm(values, torch.inf, dim=others, dtype=torch.float32)
    return replace(found, peaks=largest)


def _measured(values: Tensor, axis: int, layout: tuple[int, int] | None, images: int) -> Measured:
    if layout is not None and values.is_cuda:
        measured = _by_kernel(values, axis, *layout, images)
    elif layout is not None and values.dtype is torch.float32 and not observer.why_unavailable():
        measured = _in_one_pass(values, values.shape[axis], *layout)
    else:
        measured = None
    return measured or _by_torch(values, axis)


def _layout(values: Tensor, axis: int) -> tuple[int, int] | None:
    """Return the numbers before and behind a channel, as they lie in memory; None: scattered."""
    if not values.numel():
        return None
    shape = values.shape
    if values.is_contiguous():
        return shape[:axis].numel(), shape[axis + 1 :].numel()
    last = values.movedim(axis, -1)
    return (values.numel() // shape[axis], 1) if last.is_contiguous() else None


def _by_kernel(values: Tensor, axis: int, outer: int, inner: int, images: int) -> Measured | None:
    """Return what a kernel measures, and of more than one image their peaks; None: there is none.

    Sums are of parts of images.
    """
    channels = values.shape[axis]
    name = "observe_columns" if inner == 1 else "observe_pictures"
    known = values.dtype in IO_DTYPES.values() and (inner == 1 or outer <= _MOST_PICTURES)
    if not known or not _has_kernel(name, values.device, channels, forced()):
        return None
    if inner == 1:
        rows = values.movedim(axis, -1).reshape(outer, channels)
        sums, counts = call(OPS[name], rows, _chunks(outer, channels, images))
    else:
        sums, counts = call(OPS[name], values.reshape(outer, channels, inner))
    return Measured(
        sums[:, 0].amax(dim=0),
        sums[:, 1:].sum(dim=0, dtype=torch.float64),
        counts.sum(dim=0, dtype=torch.float64),
        outer * inner,
        sums[:, 0].reshape(images, -1).amax(dim=1) if images > 1 else None,
    )


@lru_cache(maxsize=1024)
def _chunks(rows: int, channels: int, images: int = 1) -> int:
    """Return the parts of a launch; of several images each has as many, of as many rows."""
    most = min(-(-rows // _LEAST_ROWS), max(_BLOCKS // -(-channels // _SLAB), 1))
    if images == 1:
        return most
    own = rows // images
    return images * next(n for n in range(max(most // images, 1), 0, -1) if own % n == 0)


@lru_cache(maxsize=1024)
def _has_kernel(op: str, device: torch.device, channels: int, asked: Backend | None) -> bool:
    return asked is not Backend.REFERENCE and (
        choose(op, device, k=channels).backend is Backend.GPU
    )


def _in_one_pass(values: Tensor, channels: int, outer: int, inner: int) -> Measured:
    amax = torch.zeros(channels)
    # One tensor for all: making each takes as long as a small input.
    totals = torch.zeros(2 * channels + BINS, dtype=torch.float64)
    sums = totals.data_ptr()
    places = (sums, sums + 8 * channels, sums + 16 * channels)
    sizes = (outer, channels, inner, torch.get_num_threads())
    observer.observe(observer.Observe(values.data_ptr(), amax.data_ptr(), *places, *sizes))
    histogram = totals[2 * channels :]
    return Measured(amax, totals[: 2 * channels].view(2, channels), histogram, outer * inner)


def _by_torch(values: Tensor, axis: int) -> Measured:
    others = [other for other in range(values.ndim) if other != axis]
    norm = torch.linalg.vector_norm
    amax = norm(values, torch.inf, dim=others, dtype=torch.float32)
    if values.is_cuda:
        # One launch for two; on a CPU its sums are those of a single running total.
        squares = norm(values, 2, dim=others, dtype=torch.float32).square_()
    else:
        squares = values.float().square().sum(dim=others)
    sums = torch.stack((values.sum(dim=others, dtype=torch.float32), squares)).double()
    return Measured(amax, sums, count_bins(values.float()), values.numel() // len(amax))
