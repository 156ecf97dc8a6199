"""Metrics of pictures against scikit-image, hand-computed values and their definitions."""

import numpy as np
import pytest
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.metrics import METRICS, Better

from quantkit.errors import ShapeError
from tests.support.pictures import PAIR_METRICS, SMALL, noisy, pixels


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_identical_pictures_give_the_identity_value(metric):
    picture = pixels()
    assert metric.pair(picture, picture.copy(), SMALL) == pytest.approx(metric.identity, abs=1e-12)


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_metrics_are_symmetric_and_in_range(metric):
    first, second = pixels(0), pixels(1)
    there, back = metric.pair(first, second, SMALL), metric.pair(second, first, SMALL)
    assert there == pytest.approx(back, rel=1e-6)
    assert metric.minimum <= there <= metric.maximum
    assert there != metric.identity


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_more_noise_is_worse(metric):
    picture = pixels()
    values = [metric.pair(picture, noisy(picture, sigma), SMALL) for sigma in (2, 10, 40)]
    assert values == sorted(values, reverse=metric.better is Better.HIGHER)


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_metrics_refuse_two_sizes(metric):
    with pytest.raises(ShapeError, match=r"40x48 against 48x48 pixels"):
        metric.pair(pixels(), pixels(width=48), SMALL)


def test_mse_and_psnr_of_a_hand_computed_pair():
    # One of four values differs by 51 = 255/5: MSE = (1/5)^2 / 4 = 0.01, PSNR = 20 dB.
    first = np.zeros((2, 2, 3), np.uint8)
    second = first.copy()
    second[0, 0] = 51
    assert METRICS["mse"].pair(first, second, Backbones()) == pytest.approx(0.01, rel=1e-12)
    assert METRICS["psnr"].pair(first, second, Backbones()) == pytest.approx(20.0, rel=1e-12)


def test_mse_and_psnr_equal_scikit_image():
    from skimage.metrics import mean_squared_error, peak_signal_noise_ratio

    first, second = pixels(0), pixels(1)
    assert METRICS["mse"].pair(first, second, Backbones()) == pytest.approx(
        mean_squared_error(first / 255, second / 255), rel=1e-12
    )
    assert METRICS["psnr"].pair(first, second, Backbones()) == pytest.approx(
        peak_signal_noise_ratio(first, second, data_range=255), rel=1e-12
    )


def test_ssim_equals_its_definition_on_one_window():
    """On 7x7 pixels there is one window, so Wang's formula can be written out.

    Source: Wang et al. 2004, equation 13; K1 = 0.01, K2 = 0.03, sample (n - 1) covariances.
    """
    first, second = pixels(0, 8, 8)[:7, :7], noisy(pixels(2, 8, 8), 30)[:7, :7]
    scores = []
    for channel in range(3):
        x, y = (p[..., channel].ravel() / 255.0 for p in (first, second))
        (vx, cxy), (_, vy) = np.cov(x, y)
        c1, c2 = 0.01**2, 0.03**2
        scores.append(
            (2 * x.mean() * y.mean() + c1)
            * (2 * cxy + c2)
            / ((x.mean() ** 2 + y.mean() ** 2 + c1) * (vx + vy + c2))
        )
    assert METRICS["ssim"].pair(first, second, Backbones()) == pytest.approx(
        np.mean(scores), rel=1e-9
    )


def test_ssim_does_not_depend_on_the_scale_of_values():
    from skimage.metrics import structural_similarity

    first, second = pixels(0), noisy(pixels(0), 12)
    expected = structural_similarity(first, second, data_range=255, channel_axis=-1)
    assert METRICS["ssim"].pair(first, second, Backbones()) == pytest.approx(expected, rel=1e-9)


def test_ssim_refuses_less_than_a_window():
    tiny = np.zeros((6, 9, 3), np.uint8)
    with pytest.raises(ShapeError, match="9x6 pixels; expected at least 7x7"):
        METRICS["ssim"].pair(tiny, tiny, Backbones())
