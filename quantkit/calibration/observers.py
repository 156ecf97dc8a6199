"""From statistics to static activation scales: where to clip, and what scale that is."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.calibration.histogram import bin_edges
from quantkit.calibration.statistics import LayerStatistics
from quantkit.errors import RecipeError
from quantkit.models.plan import choose_edges
from quantkit.numerics.formats import FloatFormat
from quantkit.numerics.scales import cast, scale_of_amax
from quantkit.recipe import ActivationRecipe

#: Candidates of the MSE search, as fractions of amax: an eighth of a binade apart, over two
#: binades. A float format loses little to a large scale: the best clip of 200,000 Gaussian, Laplace
#: and Student-t (2.5 degrees) values, and of Gaussian ones with an outlier of 300, was over 0.9.
CLIP_GRID = tuple(2.0 ** (-step / 8) for step in range(17))

#: Values that stand for one bin: half a code of e4m3 is wide enough to need more than its middle.
_POINTS = 4


def clip_at_amax(statistics: LayerStatistics, fmt: FloatFormat, percentile: float) -> Tensor:
    """Clip nothing that was seen. Both options are ignored."""
    del fmt, percentile
    return statistics.amax


def clip_at_percentile(statistics: LayerStatistics, fmt: FloatFormat, percentile: float) -> Tensor:
    """Clip at the |x| that ``percentile`` percent of the values do not exceed."""
    del fmt
    return statistics.percentile(percentile).float()


def clip_of_least_error(statistics: LayerStatistics, fmt: FloatFormat, percentile: float) -> Tensor:
    """Clip where the expected squared error of clipping and rounding is least.

    The expectation runs over the histogram, values even inside each bin; the larger clip wins ties.
    """
    del percentile
    clips = [
        _best_clip(histogram, float(amax), fmt)
        for histogram, amax in zip(statistics.histogram, statistics.amax, strict=True)
    ]
    return torch.tensor(clips)


#: (statistics, format, percentile) -> clip value per bucket, float32 (B,)
Observer = Callable[[LayerStatistics, FloatFormat, float], Tensor]

OBSERVERS: dict[str, Observer] = {
    "amax": clip_at_amax,
    "percentile": clip_at_percentile,
    "mse": clip_of_least_error,
}


def static_scale(
    statistics: LayerStatistics,
    activation: ActivationRecipe,
    fmt: FloatFormat,
    smooth: Tensor | None = None,
    *,
    edges: Sequence[float] = (),
) -> Tensor:
    """Return the static scale of a layer's input, one per timestep bucket.

    Args:
        statistics: of the layer.
        activation: mode static; observer, percentile and buckets are read.
        fmt: the format of the layer's weight.
        smooth: (C,) factor the input is multiplied by, or None.
        edges: of the calibration.

    Returns:
        float32, [] for one bucket or [buckets]; 1.0 where only zeros were seen.

    Raises:
        RecipeError: buckets that the calibration cannot be pooled into; smooth with an observer
            that reads the histogram, which was taken before smoothing.
    """
    wanted = choose_edges(activation, tuple(edges))
    pooled = statistics.rebucketed(edges, wanted)
    if smooth is None:
        clip = OBSERVERS[activation.observer](pooled, fmt, activation.percentile)
    elif activation.observer == "amax":
        clip = (pooled.channel_amax * smooth).amax(dim=1)
    else:
        raise RecipeError(
            f"activation.observer {activation.observer}: the histogram was taken before "
            "smoothing; use amax"
        )
    scale = scale_of_amax(clip, fmt)
    return scale if wanted else scale[0]


def _best_clip(histogram: Tensor, amax: float, fmt: FloatFormat) -> float:
    values, weights = _points(histogram, amax)
    best, best_error = amax, torch.inf
    for fraction in CLIP_GRID:
        scale = scale_of_amax(torch.tensor(amax * fraction), fmt)
        error = float((weights * (cast(values / scale, fmt).float() * scale - values) ** 2).sum())
        if error < best_error:
            best, best_error = amax * fraction, error
    return best


def _points(histogram: Tensor, amax: float) -> tuple[Tensor, Tensor]:
    """Return values that stand for the occupied bins, and how many values each stands for."""
    edges = bin_edges()
    occupied = histogram > 0
    low, high = edges[:-1][occupied], edges[1:][occupied].clamp(max=amax)
    middles = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
    values = low.unsqueeze(1) + (high - low).unsqueeze(1) * middles
    weights = (histogram[occupied] / _POINTS).unsqueeze(1).expand_as(values)
    return values.flatten().float(), weights.flatten()
