"""The statistics of an input after its channels were rescaled, which nobody observed."""

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.calibration.statistics import LayerStatistics
from quantkit.errors import ArtefactError
from quantkit.numerics.histogram import count_bins


def refuse_without_samples(statistics: LayerStatistics, why: str) -> None:
    """Refuse what reads the samples, before any work is done.

    Raises:
        ArtefactError: they come from a file of version 1 or 2.
    """
    if statistics.samples is None:
        raise ArtefactError(
            f"{why}: the calibration has no samples (format_version 1 or 2); calibrate again"
        )


def rescaled(statistics: LayerStatistics, factor: Tensor) -> LayerStatistics:
    """Return the statistics that an input has after a multiplication.

    Largest values are exact. The histogram is an estimate: the stored rows stand for all values,
    and every channel's largest value, which is rarely among them, for itself.

    Args:
        statistics: of the input as it was, with samples.
        factor: (C,) positive float32.

    Returns:
        amax, histogram and channel_amax; the rest is not of use after this.
    """
    samples, counts = statistics.samples, statistics.sample_count
    assert samples is not None, "callers refuse statistics without samples"
    assert counts is not None
    loud = statistics.channel_amax * factor
    histogram = torch.zeros_like(statistics.histogram)
    for bucket, (rows, known, largest) in enumerate(
        zip(samples, counts.tolist(), loud, strict=True)
    ):
        taps = rows[:known].float().reshape(-1, len(factor))
        # Rounding to bfloat16 may have lifted a value over the largest one.
        values = (taps * factor).abs().minimum(largest)
        stands_for = float(statistics.count[bucket]) * len(largest) / max(values.numel(), 1)
        histogram[bucket] = count_bins(values) * max(stands_for, 1.0) + count_bins(largest)
    return replace(statistics, amax=loud.amax(dim=1), histogram=histogram, channel_amax=loud)
