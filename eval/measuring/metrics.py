"""The image metrics: one row each in METRICS, one function each. Networks are in backbones.py."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf, log10

import numpy as np
from numpy.typing import NDArray
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.pictures import Pixels, check_same_size
from skimage.metrics import structural_similarity

from quantkit.errors import ShapeError

#: Side of the sliding window of SSIM: scikit-image's default.
SSIM_WINDOW = 7

PairMeasure = Callable[[Pixels, Pixels, Backbones], float]
PromptMeasure = Callable[[Pixels, str, Backbones], float]


class Better(Enum):
    """The direction in which a metric improves."""

    HIGHER = "higher"
    LOWER = "lower"


class Needs(Enum):
    """The input of a metric."""

    #: the original's picture and the packed pipeline's
    PAIR = "pair"
    #: one picture and its prompt
    PROMPT = "prompt"


@dataclass(frozen=True)
class Metric:
    """One metric; exactly one of ``pair`` and ``prompt`` computes it."""

    name: str
    title: str
    better: Better
    unit: str
    minimum: float
    maximum: float
    #: the value for identical pictures; None when it depends on the picture
    identity: float | None
    meaning: str
    pair: PairMeasure | None = None
    prompt: PromptMeasure | None = None
    #: which backbone must be there, as a field of Backbones
    backbone: str | None = None

    @property
    def needs(self) -> Needs:
        """The input of the metric."""
        return Needs.PAIR if self.pair else Needs.PROMPT


def measure_mse(first: Pixels, second: Pixels, backbones: Backbones) -> float:
    """Return the mean squared difference of values scaled to [0, 1]."""
    del backbones
    check_same_size("mse", first, second)
    return float(np.mean((_unit(first) - _unit(second)) ** 2))


def measure_psnr(first: Pixels, second: Pixels, backbones: Backbones) -> float:
    """Return 10 log10(1 / MSE) in dB; infinite for identical pictures."""
    mse = measure_mse(first, second, backbones)
    return inf if mse == 0.0 else -10.0 * log10(mse)


def measure_ssim(first: Pixels, second: Pixels, backbones: Backbones) -> float:
    """Return the structural similarity, averaged over windows and colour channels.

    Raises:
        ShapeError: the sizes differ, or a side is smaller than the window.

    Source: Wang et al. 2004, doi:10.1109/TIP.2003.819861, as scikit-image computes it.
    """
    del backbones
    check_same_size("ssim", first, second)
    if min(first.shape[:2]) < SSIM_WINDOW:
        raise ShapeError(
            f"ssim: {first.shape[1]}x{first.shape[0]} pixels; expected at least "
            f"{SSIM_WINDOW}x{SSIM_WINDOW}, the size of its window"
        )
    score = structural_similarity(
        _unit(first), _unit(second), win_size=SSIM_WINDOW, data_range=1.0, channel_axis=-1
    )
    return float(score)


def measure_lpips(first: Pixels, second: Pixels, backbones: Backbones) -> float:
    """Return the LPIPS distance under the backbone that ``backbones`` names."""
    assert backbones.lpips is not None
    check_same_size("lpips", first, second)
    return backbones.lpips.distance(first, second)


def measure_clip(picture: Pixels, prompt: str, backbones: Backbones) -> float:
    """Return 100 times the cosine between picture and prompt under the named CLIP model."""
    assert backbones.clip is not None
    return backbones.clip.score(picture, prompt)


_METRICS = (
    Metric(
        "mse", "MSE", Better.LOWER, "", 0.0, 1.0, 0.0,
        "mean squared difference of pixel values in [0, 1]", pair=measure_mse,
    ),
    Metric(
        "psnr", "PSNR", Better.HIGHER, "dB", 0.0, inf, inf,
        "peak signal to noise ratio; infinite for identical pictures", pair=measure_psnr,
    ),
    Metric(
        "ssim", "SSIM", Better.HIGHER, "", -1.0, 1.0, 1.0,
        f"structural similarity, {SSIM_WINDOW}x{SSIM_WINDOW} window, mean over channels",
        pair=measure_ssim,
    ),
    Metric(
        "lpips", "LPIPS", Better.LOWER, "", 0.0, inf, 0.0,
        "perceptual distance between feature maps of a network",
        pair=measure_lpips, backbone="lpips",
    ),
    Metric(
        "clip", "CLIP score", Better.HIGHER, "", -100.0, 100.0, None,
        "100 x cosine between picture and prompt", prompt=measure_clip, backbone="clip",
    ),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _METRICS}


def _unit(pixels: Pixels) -> NDArray[np.float64]:
    return pixels.astype(np.float64) / 255.0
