"""Histograms of |x| over bins that are fixed once and for all, so that they add up exactly.

A bin is a run of float32 values that agree in sign-less exponent and leading mantissa bits: finding
it is two integer operations, without a logarithm, and its edges are exact.
"""

import torch
from torch import Tensor

#: Bits of the mantissa that name a bin: 16 bins a binade, twice as fine as e4m3's 8 codes.
BIN_BITS = 4
#: Binades covered: float16's smallest subnormal is 2**-24, its largest value is below 2**16.
FIRST_EXPONENT, LAST_EXPONENT = -24, 16

_SHIFT = 23 - BIN_BITS
_FIRST = (FIRST_EXPONENT + 127) << BIN_BITS
_INNER = (LAST_EXPONENT - FIRST_EXPONENT + 1) << BIN_BITS

#: Bin 0 holds [0, 2**-24), the last bin everything from 2**17.
BINS = _INNER + 2


def bin_index(values: Tensor) -> Tensor:
    """Return the bin of every |value|.

    Args:
        values: any shape, float32, finite.

    Returns:
        int32, 0 to BINS - 1.
    """
    magnitude = values.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)
    return (magnitude >> _SHIFT).sub_(_FIRST - 1).clamp_(0, BINS - 1)


def count_bins(values: Tensor) -> Tensor:
    """Return how many values each bin holds, float64 (BINS,), on the device of ``values``."""
    index = bin_index(values).flatten()
    if index.is_cuda:
        return count_without_waiting(index)
    return torch.bincount(index, minlength=BINS).double()


def count_without_waiting(index: Tensor) -> Tensor:
    """Count bin numbers as bincount does, which on a GPU would wait for the device.

    histc counts in float32 per block and adds the blocks: exact to one part in 2**24.
    """
    return torch.histc(index.float(), BINS, min=-0.5, max=BINS - 0.5).double()


def bin_edges() -> Tensor:
    """Return the edges, float64 (BINS + 1,): 0, 2**-24, ..., 2**17, inf."""
    bits = (torch.arange(_INNER + 1, dtype=torch.int32) + _FIRST) << _SHIFT
    inner = bits.view(torch.float32).double()
    ends = torch.tensor([0.0, torch.inf], dtype=torch.float64)
    return torch.cat((ends[:1], inner, ends[1:]))


def quantiles(counts: Tensor, amax: Tensor, share: float) -> Tensor:
    """Return the value that a share of the counted values does not exceed.

    Args:
        counts: (B, BINS).
        amax: (B,), the exact maximum: no bin reaches further.
        share: 0 to 1; ranks are those of ``torch.quantile``, linear inside a bin.

    Returns:
        float64 (B,); 0 where nothing was counted.
    """
    edges = bin_edges()
    top = amax.double().unsqueeze(1)
    cumulated = counts.double().cumsum(dim=1)
    total = cumulated[:, -1:]
    rank = (total - 1).clamp(min=0) * share
    index = torch.searchsorted(cumulated, rank, right=True).clamp(max=BINS - 1)
    inside = counts.double().gather(1, index)
    before = cumulated.gather(1, index) - inside
    low, high = edges[index].minimum(top), edges[index + 1].minimum(top)
    # The r-th of n values in a bin is taken at (r + 1) / n of it, so that the last one is amax.
    value = low + (high - low) * ((rank - before + 1) / inside.clamp(min=1)).clamp(0, 1)
    return torch.where(total > 0, value, torch.zeros_like(value)).squeeze(1)
