"""What is summed up of one input: one pass over it on the CPU, a few launches on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.device.host import observer
from quantkit.numerics.histogram import BINS, count_bins


@dataclass(frozen=True, eq=False)
class Measured:
    """Of one input, by channel, on its device."""

    #: float32 (C,), largest |x|; NaN or Inf where the input holds such
    amax: Tensor
    #: (C,), sum of x, and of x**2, float32 or float64
    values: Tensor
    squares: Tensor
    #: float64 (BINS,), of |x|
    histogram: Tensor
    #: float32 (), the largest of ``amax``
    largest: Tensor
    #: values of a channel
    count: int


def measure(values: Tensor, channel_axis: int) -> Measured:
    """Return what statistics are made of, without waiting for the device.

    Args:
        values: of any float dtype; (..., C), or with channels at another axis.
        channel_axis: that of the channels.
    """
    axis = channel_axis % values.ndim
    layout = None if values.device.type != "cpu" else _layout(values, axis)
    if layout is None or observer.why_unavailable():
        return _by_torch(values, axis)
    return _in_one_pass(values, values.shape[axis], *layout)


def _layout(values: Tensor, axis: int) -> tuple[int, int] | None:
    """Return the numbers before and behind a channel, as they lie in memory; None: no core."""
    if values.dtype != torch.float32 or not values.numel():
        return None
    shape = values.shape
    if values.is_contiguous():
        return shape[:axis].numel(), shape[axis + 1 :].numel()
    last = values.movedim(axis, -1)
    return (values.numel() // shape[axis], 1) if last.is_contiguous() else None


def _in_one_pass(values: Tensor, channels: int, outer: int, inner: int) -> Measured:
    amax = torch.zeros(channels)
    sums, squares = torch.zeros(2, channels, dtype=torch.float64).unbind()
    counts = torch.zeros(BINS, dtype=torch.int64)
    addresses = (t.data_ptr() for t in (values, amax, sums, squares, counts))
    observer.observe(observer.Observe(*addresses, outer, channels, inner, torch.get_num_threads()))
    return Measured(amax, sums, squares, counts.double(), amax.amax(), outer * inner)


def _by_torch(values: Tensor, axis: int) -> Measured:
    others = [other for other in range(values.ndim) if other != axis]
    norm = torch.linalg.vector_norm
    amax = norm(values, torch.inf, dim=others, dtype=torch.float32)
    if values.is_cuda:
        # One launch for two; on a CPU its sums are those of a single running total.
        squares = norm(values, 2, dim=others, dtype=torch.float32).square_()
    else:
        squares = values.float().square().sum(dim=others)
    sums = values.sum(dim=others, dtype=torch.float32)
    counts = count_bins(values.float())
    return Measured(amax, sums, squares, counts, amax.amax(), values.numel() // len(amax))
