"""Shifting inputs by their mean before they are quantized, and putting it back in the output.

A float format rounds in proportion to the value, so what lies around zero is rounded more finely
than the same spread around a mean. W x = W (x - shift) + W shift, and the last term is exact.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.calibration.statistics import LayerStatistics, per_column
from quantkit.errors import ArtefactError
from quantkit.numerics.histogram import count_bins


def input_shift(
    statistics: LayerStatistics, stored: Sequence[float], wanted: Sequence[float]
) -> Tensor:
    """Return the mean of each input channel, which minimises the power of what is left.

    Args:
        statistics: of the layer.
        stored: the edges of the calibration.
        wanted: those that shifts are kept apart for, some of ``stored``.

    Returns:
        float32 (C,), or (edges + 1, C) with edges.

    Raises:
        ArtefactError: the statistics come from a file that did not hold the mean.

    Source: Wei et al. 2023, Outlier Suppression+, arXiv:2304.09145, which shifts by the middle of
    the range, as integers want it.
    """
    refuse_without_mean(statistics)
    mean = statistics.rebucketed(stored, wanted).mean
    assert mean is not None
    return mean if wanted else mean[0]


def refuse_without_mean(statistics: LayerStatistics) -> None:
    """Refuse statistics without means and samples, before any work is done.

    Raises:
        ArtefactError: they come from a file of version 1 or 2.
    """
    if statistics.mean is None or statistics.samples is None:
        raise ArtefactError(
            "activation.shift: the calibration has no means (format_version 2 or older); "
            "calibrate again, or drop shift"
        )


def shifted(statistics: LayerStatistics, shift: Tensor, smooth: Tensor | None) -> LayerStatistics:
    """Return the statistics of (x - shift) * smooth, as far as scales are chosen from them.

    The histogram is that of the stored rows; the largest values are bounds, of what was seen at
    one end of the range and the shift towards the other.

    Args:
        statistics: of x, in as many buckets as ``shift`` has rows.
        shift: float32 (B, C).
        smooth: float32 (C,) or None.
    """
    assert statistics.samples is not None
    assert statistics.sample_count is not None
    area = statistics.samples.shape[-1] // shift.shape[-1]
    factor = torch.ones(shift.shape[-1]) if smooth is None else smooth
    rows = statistics.samples.float() - per_column(shift, area).unsqueeze(1)
    rows = rows * per_column(factor, area)
    loud = (statistics.channel_amax + shift.abs()) * factor
    counts = [count_bins(r[:n]) for r, n in zip(rows, statistics.sample_count, strict=True)]
    return replace(
        statistics, amax=loud.amax(dim=1), channel_amax=loud, histogram=torch.stack(counts).double()
    )
