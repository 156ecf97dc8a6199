"""Smoothing: factors between a layer's input and its weight."""

import pytest
import torch

from quantkit.calibration.statistics.smoothing import smooth_factor
from quantkit.errors import ShapeError
from quantkit.numerics.packed_2to4 import to_rows
from tests.support.observed import sample, statistics_of


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_changes_no_product(alpha):
    x, w = sample("heavy", rows=50), sample("gaussian", rows=16)
    factor = smooth_factor(statistics_of(x), w, alpha)
    torch.testing.assert_close((x * factor) @ (w / factor).T, x @ w.T, rtol=1e-4, atol=1e-3)
    if alpha == 0.5:
        loud, heavy = (x * factor).abs().amax(0), (w / factor).abs().amax(0)
        torch.testing.assert_close(loud, heavy)
    if alpha == 1.0:
        torch.testing.assert_close((x * factor).abs().amax(0), torch.ones(8))


def test_taps_of_a_convolution_share_a_factor():
    x, weight = sample("heavy"), torch.randn(6, 8, 3, 3)
    factor = smooth_factor(statistics_of(x), to_rows(weight), 0.5)
    per_channel = weight.abs().amax(dim=(0, 2, 3))
    torch.testing.assert_close(factor, (per_channel / x.abs().amax(0)).sqrt())


def test_silent_channels_are_left_alone():
    x, w = sample("gaussian"), torch.randn(4, 8)
    x[:, 2], w[:, 5] = 0, 0
    factor = smooth_factor(statistics_of(x), w, 0.5)
    assert (factor[2], factor[5]) == (1.0, 1.0)
    assert bool(factor.isfinite().all())
    with pytest.raises(ShapeError, match="K 9 is not a multiple of the 8 input channels"):
        smooth_factor(statistics_of(x), torch.randn(4, 9), 0.5)
