"""Rescaling input channels: SmoothQuant."""

import torch
from torch import Tensor

from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from quantkit.errors import ShapeError


def input_factor(alpha: float | None, statistics: LayerStatistics, columns: Tensor) -> Tensor:
    """Return what the input is multiplied by, and the weight divided by.

    Args:
        alpha: SmoothQuant's strength, 0 to 1; None: ones.
        statistics: of the layer's input.
        columns: (K,) amax of each column of the weight.

    Returns:
        float32 (C,), positive.
    """
    if alpha is None:
        return torch.ones(statistics.channel_amax.shape[1])
    # The factor depends on the columns' amax alone, so one row stands for the whole weight.
    return smooth_factor(statistics, columns.unsqueeze(0), alpha)


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
