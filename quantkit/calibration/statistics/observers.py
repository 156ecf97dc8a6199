"""Static activation scales from statistics: where to clip, and what scale that is."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from quantkit.calibration.statistics.rescaled_statistics import rescaled
from quantkit.models.layer_plan import choose_edges
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.histogram import bin_edges
from quantkit.numerics.scales import cast, power_of_two, scale_of_amax
from quantkit.recipe.layer_recipes import ActivationRecipe

#: Candidates of the MSE search, as fractions of amax: an eighth of a binade apart, over two
#: binades. A float format loses little to a large scale: the best clip of 200,000 Gaussian, Laplace
#: and Student-t (2.5 degrees) values, and of Gaussian ones with an outlier of 300, was over 0.9.
CLIP_GRID = tuple(2.0 ** (-step / 8) for step in range(17))
#: The same for integers, half as far apart and over five binades: steps of one size for all values
#: make the best clip depend on the tail alone.
INTEGER_CLIP_GRID = tuple(2.0 ** (-step / 16) for step in range(81))

#: Neighbouring buckets whose scales are within this factor share one, where the recipe says auto:
#: two steps of CLIP_GRID, since neighbours that see the same may differ by one.
AUTO_TOLERANCE = 2.0**0.25

#: Inputs of other prompts exceed the largest |x| of those that calibrated, and pictures whose
#: inputs are clipped become others (docs/guides/calibrate.md). 1.3 loses by rounding what it gains.
HEADROOM = 1.15

#: Values that stand for one bin: half a code of e4m3 is wide enough to need more than its middle.
_POINTS = 4

#: Divergences as close as this, in nats, differ by rounding alone.
_TIE = 1e-9


def clip_at_amax(statistics: LayerStatistics, fmt: NumberFormat, percentile: float) -> Tensor:
    """Clip nothing that was seen. Both options are ignored."""
    del fmt, percentile
    return statistics.amax


def clip_at_percentile(statistics: LayerStatistics, fmt: NumberFormat, percentile: float) -> Tensor:
    """Clip at the |x| that ``percentile`` percent of the values do not exceed."""
    del fmt
    return statistics.percentile(percentile).float()


def clip_of_least_error(
    statistics: LayerStatistics, fmt: NumberFormat, percentile: float
) -> Tensor:
    """Clip where the expected squared error of clipping and rounding is least.

    The expectation runs over the histogram, values even inside each bin; the larger clip wins ties.
    """
    del percentile
    clips = [
        _best_clip(histogram, float(amax), fmt)
        for histogram, amax in zip(statistics.histogram, statistics.amax, strict=True)
    ]
    return torch.tensor(clips)


def clip_of_least_divergence(
    statistics: LayerStatistics, fmt: NumberFormat, percentile: float
) -> Tensor:
    """Clip where the quantized distribution diverges least from the observed one.

    Quantizing leaves of the distribution how many values each code has, spread evenly over the
    code's interval. The observed one has what lies beyond the clip on the largest code; the
    quantized one has it not, but for one value, so that clipping costs the more the fewer values
    there were at the clip. The Kullback-Leibler divergence then grows with what is clipped and
    with what coarse codes merge. Values below 2**-24 do not count: zero is exact under every scale.
    The larger clip wins ties.

    Source: entropy calibration as in Migacz 2017, 8-bit Inference with TensorRT (GTC), for the
    codes of a float format instead of even steps.
    """
    del percentile
    clips = [
        _least_divergent_clip(histogram, float(amax), fmt)
        for histogram, amax in zip(statistics.histogram, statistics.amax, strict=True)
    ]
    return torch.tensor(clips)


def clip_at_moving_average(
    statistics: LayerStatistics, fmt: NumberFormat, percentile: float
) -> Tensor:
    """Clip at the moving average of the largest |x| of each call.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3.1.
    """
    del fmt, percentile
    return statistics.moving_amax.float()


#: (statistics, format, percentile) -> clip value per bucket, float32 (B,)
Observer = Callable[[LayerStatistics, NumberFormat, float], Tensor]

OBSERVERS: dict[str, Observer] = {
    "amax": clip_at_amax,
    "percentile": clip_at_percentile,
    "mse": clip_of_least_error,
    "kl": clip_of_least_divergence,
    "moving_average": clip_at_moving_average,
}


def static_scale(
    statistics: LayerStatistics,
    activation: ActivationRecipe,
    fmt: NumberFormat,
    smooth: Tensor | None = None,
    *,
    edges: Sequence[float] = (),
    headroom: float = 1.0,
) -> Tensor:
    """Return the static scale of a layer's input, one per timestep bucket.

    Args:
        statistics: of the layer.
        activation: mode static; observer, percentile and buckets are read.
        fmt: the format of the layer's weight.
        smooth: (C,) factor the input is multiplied by, or None.
        edges: of the calibration.
        headroom: what the largest |x| is multiplied by, where the observer is amax.

    Returns:
        float32, [] for one bucket or [buckets]; 1.0 where only zeros were seen, the largest of the
        others where nothing was; powers of two where the recipe says so.

    Raises:
        RecipeError: buckets that the calibration cannot be pooled into.
        ArtefactError: smooth with an observer that needs samples, and there are none.
    """
    expected = choose_edges(activation, tuple(edges))
    pooled = statistics.rebucketed(edges, expected)
    if smooth is None:
        clip = OBSERVERS[activation.observer](pooled, fmt, activation.percentile)
    else:
        clip = clip_after(pooled, activation, fmt, smooth)
    # A layer may be called at some timesteps only; another prompt may call it at others.
    clip = torch.where(pooled.count > 0, clip, clip.max())
    if activation.observer == "amax":
        clip = clip * headroom
    scale = scale_of_amax(clip, fmt)
    if activation.scale == "pow2":
        # Upwards: a float loses little to a large scale, and much to clipping.
        scale = power_of_two(scale)
    return scale if expected else scale[0]


def clip_after(
    statistics: LayerStatistics,
    activation: ActivationRecipe,
    fmt: NumberFormat,
    factor: Tensor,
) -> Tensor:
    """Return where an input is clipped after its channels were rescaled.

    Args:
        statistics: of the input before that.
        activation: observer and percentile are read.
        fmt: the format of the layer's weight.
        factor: (C,).

    Returns:
        float32 (B,).
    """
    if activation.observer == "amax":
        return (statistics.channel_amax * factor).amax(dim=1)
    observed = rescaled(statistics, factor)
    return OBSERVERS[activation.observer](observed, fmt, activation.percentile)


def agreeing_edges(
    statistics: LayerStatistics,
    activation: ActivationRecipe,
    fmt: NumberFormat,
    edges: Sequence[float],
) -> tuple[float, ...]:
    """Return the edges left when neighbouring buckets whose scales agree are poured together.

    From the lowest timestep up, a bucket joins the one below it as long as all scales in it stay
    within ``AUTO_TOLERANCE`` of each other; one that saw only zeros joins any.

    Args:
        statistics: of the layer.
        activation: mode static; observer and percentile choose the scales.
        fmt: the format of the layer's weight.
        edges: of the calibration.

    Returns:
        ascending, some of ``edges``; () when all agree.
    """
    scales = static_scale(statistics, activation, fmt, edges=edges).reshape(-1).tolist()
    starts = (float("-inf"), *edges)
    kept: list[float] = []
    run: list[float] = []
    for start, scale, amax in zip(starts, scales, statistics.amax.tolist(), strict=True):
        if amax == 0:
            continue
        if run and max(*run, scale) > AUTO_TOLERANCE * min(*run, scale):
            kept.append(start)
            run = []
        run.append(scale)
    return tuple(kept)


def clip_grid(fmt: NumberFormat) -> tuple[float, ...]:
    """Return where a static scale may clip, as fractions of amax, the largest first."""
    return INTEGER_CLIP_GRID if fmt.is_integer else CLIP_GRID


def _best_clip(histogram: Tensor, amax: float, fmt: NumberFormat) -> float:
    values, weights = _points(histogram, amax)
    best, best_error = amax, torch.inf
    for fraction in clip_grid(fmt):
        scale = scale_of_amax(torch.tensor(amax * fraction), fmt)
        error = float((weights * (cast(values / scale, fmt).float() * scale - values) ** 2).sum())
        if error < best_error:
            best, best_error = amax * fraction, error
    return best


def _least_divergent_clip(histogram: Tensor, amax: float, fmt: NumberFormat) -> float:
    normal = histogram.clone()
    normal[0] = 0
    if not normal.any():
        return amax
    top = int(torch.tensor(fmt.max).to(fmt.torch_dtype).view(torch.uint8))
    values, weights = _points(normal, amax)
    widths = _widths(normal, amax)
    best, best_divergence = amax, torch.inf
    for fraction in clip_grid(fmt):
        kept = values <= amax * fraction
        scale = scale_of_amax(torch.tensor(amax * fraction), fmt)
        codes = cast(values[kept] / scale, fmt).view(torch.uint8).long()
        lost = float(weights[~kept].sum())
        divergence = _divergence(weights[kept], widths[kept], codes, top, lost)
        if divergence < best_divergence - _TIE:
            best, best_divergence = amax * fraction, divergence
    return best


def _divergence(weights: Tensor, widths: Tensor, codes: Tensor, top: int, lost: float) -> float:
    """Return the divergence in nats: that between codes, and that inside each of them.

    Args:
        weights: float64 (P,), values that each point below the clip stands for.
        widths: float64 (P,), the stretch of the axis that it stands for.
        codes: int64 (P,), the code it gets.
        top: the largest code.
        lost: values beyond the clip.
    """
    sums = torch.zeros(2, 256, dtype=torch.float64)
    quantized, stretch = sums.index_add(1, codes, torch.stack((weights, widths)))
    observed = quantized.clone()
    observed[top] += lost
    quantized[top] += min(lost, 1.0)
    even = widths / stretch[codes]
    inside = weights + (codes == top) * lost * even
    between = _relative_entropy(observed, quantized * (observed.sum() / quantized.sum()))
    return (between + _relative_entropy(inside, observed[codes] * even)) / float(observed.sum())


def _relative_entropy(left: Tensor, right: Tensor) -> float:
    """Return sum(left * log(left / right)), of which 0 log 0 is 0."""
    some = left > 0
    return float((left[some] * (left[some] / right[some]).log()).sum())


def _points(histogram: Tensor, amax: float) -> tuple[Tensor, Tensor]:
    """Return values that stand for the occupied bins, and how many values each stands for."""
    edges = bin_edges()
    occupied = histogram > 0
    low, high = edges[:-1][occupied], edges[1:][occupied].clamp(max=amax)
    middles = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
    values = low.unsqueeze(1) + (high - low).unsqueeze(1) * middles
    weights = (histogram[occupied] / _POINTS).unsqueeze(1).expand_as(values)
    return values.flatten().float(), weights.flatten()


def _widths(histogram: Tensor, amax: float) -> Tensor:
    """Return how much of the axis each of the points stands for."""
    edges = bin_edges()
    # The overflow bin ends at amax, or has a binade; the others count whole, also the one of amax.
    edges[-1] = max(amax, 2 * float(edges[-2]))
    return (edges.diff()[histogram > 0] / _POINTS).repeat_interleave(_POINTS)
