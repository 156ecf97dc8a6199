"""The verdict on pictures of a packed model, against the original's of the same seeds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.eval.judging.gates import Compression, Limits, judge
from quantkit.eval.judging.verdict import judge_gates
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.pictures import Pairs, Pixels

#: SSIM needs no network, which a ComfyUI may not be able to download.
_LIMITS = Limits(lpips=None, clip=None, broken=None)


@dataclass(frozen=True)
class Verdict:
    """The finding on all pairs."""

    ssim: float
    words: str


def judge_pictures(original: Tensor, packed: Tensor) -> Verdict:
    """Return the mean SSIM of pairs of pictures, and whether it is within the limit.

    Args:
        original: (B, H, W, 3), 0 to 1, of the 16-bit model.
        packed: the same of the packed one, by the same seeds and prompts.

    Raises:
        InputError: other numbers of pictures.
        ShapeError: other sizes.
    """
    if len(original) != len(packed):
        raise InputError(
            f"{len(original)} pictures of the original and {len(packed)} of the packed model; "
            "make both from one latent batch and one seed"
        )
    names = tuple(str(index) for index in range(len(original)))
    comparison = compare(Pairs(names, _pixels(original), _pixels(packed)), Backbones())
    gates = judge(comparison, _LIMITS, Compression.QUANTIZED)
    ssim = comparison.scores["ssim"]
    told = ", ".join(f"{value:.4f}" for value in ssim.values)
    assert ssim.summary.mean is not None, "there are pairs, and SSIM is finite"
    words = f"{judge_gates(gates, Compression.QUANTIZED)} SSIM of each picture: {told}."
    return Verdict(ssim.summary.mean, words)


def _pixels(pictures: Tensor) -> tuple[Pixels, ...]:
    bits = pictures.float().clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8).cpu().numpy()
    return tuple(bits)
