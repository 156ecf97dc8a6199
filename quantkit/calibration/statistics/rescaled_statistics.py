"""The statistics of an input after its channels were rescaled, which nobody observed."""

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from quantkit.numerics.histogram import count_bins


def rescaled(statistics: LayerStatistics, factor: Tensor) -> LayerStatistics:
    """Return the statistics that an input has after a multiplication.

    Largest values are exact. The histogram is an estimate: the stored rows stand for all values,
    and every channel's largest value, which is rarely among them, for itself.

    Args:
        statistics: of the input as it was.
        factor: (C,) positive float32.

    Returns:
        amax, histogram and channel_amax; the rest is not of use after this.
    """
    loud = statistics.channel_amax * factor
    histogram = torch.zeros_like(statistics.histogram)
    for bucket, (rows, known, largest) in enumerate(
        zip(statistics.samples, statistics.sample_count.tolist(), loud, strict=True)
    ):
        taps = rows[:known].float().reshape(-1, len(factor))
        # Rounding to bfloat16 may have lifted a value over the largest one.
        values = (taps * factor).abs().minimum(largest)
        stands_for = float(statistics.count[bucket]) * len(largest) / max(values.numel(), 1)
        histogram[bucket] = count_bins(values) * max(stands_for, 1.0) + count_bins(largest)
    return replace(statistics, amax=loud.amax(dim=1), histogram=histogram, channel_amax=loud)
