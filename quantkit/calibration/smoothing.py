"""Rescaling input channels: SmoothQuant, and one range for both halves of a concatenation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.observers import clip_after
from quantkit.calibration.statistics import LayerStatistics
from quantkit.errors import ShapeError
from quantkit.numerics.formats import NumberFormat
from quantkit.recipe.layer_recipes import ActivationRecipe


@dataclass(frozen=True)
class Smoothing:
    """How the channels of one layer's input are rescaled."""

    #: SmoothQuant's strength, 0 to 1; None: none of it
    alpha: float | None
    #: channels of the first half of a concatenation whose halves get one range; None: no halves
    boundary: int | None


def input_factor(
    smoothing: Smoothing,
    statistics: LayerStatistics,
    columns: Tensor,
    activation: ActivationRecipe,
    fmt: NumberFormat,
) -> Tensor:
    """Return what the input is multiplied by, and the weight divided by.

    SmoothQuant comes first, which alone would undo any other factor of the halves.

    Args:
        smoothing: what is wanted.
        statistics: of the layer's input.
        columns: (K,) amax of each column of the weight.
        activation: how the input is quantized.
        fmt: the format of the layer's weight.

    Returns:
        float32 (C,), positive.
    """
    factor = torch.ones(statistics.channel_amax.shape[1])
    if smoothing.alpha is not None:
        # The factor depends on the columns' amax alone, so one row stands for the whole weight.
        factor = smooth_factor(statistics, columns.unsqueeze(0), smoothing.alpha)
    if smoothing.boundary is not None:
        factor = split_factor(statistics, smoothing.boundary, activation, fmt, factor)
    return factor


def smooth_factor(statistics: LayerStatistics, rows: Tensor, alpha: float) -> Tensor:
    """Return what the input is multiplied by, and the weight divided by.

    The factor of channel j is amax(w_j)^(1 - alpha) / amax(x_j)^alpha, over all timesteps; 1.0 for
    a channel whose input or weight is all zero.

    Args:
        statistics: of the layer's input.
        rows: (N, K) float32 weight as the kernels read it; K is C times the taps.
        alpha: 0 to 1, how much of the input's range moves.

    Returns:
        float32 (C,), for a Linear (K,); positive and finite.

    Raises:
        ShapeError: K is not a multiple of C.

    Source: Xiao et al. 2022, SmoothQuant, arXiv:2211.10438, equation 4.
    """
    loud = statistics.channel_amax.amax(dim=0).double()
    channels = len(loud)
    if rows.shape[1] % channels:
        raise ShapeError(f"K {rows.shape[1]} is not a multiple of the {channels} input channels")
    heavy = rows.abs().amax(dim=0).reshape(-1, channels).amax(dim=0).double()
    factor = heavy ** (1 - alpha) / loud**alpha
    return torch.where((loud > 0) & (heavy > 0), factor, torch.ones_like(factor)).float()


def split_factor(
    statistics: LayerStatistics,
    boundary: int,
    activation: ActivationRecipe,
    fmt: NumberFormat,
    before: Tensor,
) -> Tensor:
    """Return a factor by which both halves of a concatenation are clipped at the same value.

    One static scale then serves both as a scale per half would. The first half is left as it is.
    With several buckets the ratio of the halves' clips is their geometric mean over the buckets: a
    float format loses by the logarithm of what is left. A half that was always zero is left too.

    Args:
        statistics: of the layer's input.
        boundary: channels of the first half.
        activation: how the input is quantized; per token the clip is amax.
        fmt: the format of the layer's weight.
        before: (C,) factor that is applied anyway.

    Returns:
        float32 (C,), ``before`` included.

    Source: Li et al. 2023, Q-Diffusion, arXiv:2302.04304, section 4.2 (a quantizer per half).
    """
    if activation.mode != "static":
        activation = activation.model_copy(update={"observer": "amax"})
    first, second = (
        clip_after(statistics, activation, fmt, before, half)
        for half in (slice(None, boundary), slice(boundary, None))
    )
    seen = (first > 0) & (second > 0)
    if not seen.any():
        return before
    ratio = (first[seen].double() / second[seen].double()).log().mean().exp()
    factor = before.clone()
    factor[boundary:] *= ratio.float()
    return factor
