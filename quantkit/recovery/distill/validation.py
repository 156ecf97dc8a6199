"""Validation during training: the student's pictures compared with the teacher's.

The prompts are the same for both, and so is the noise, of seeds that no training takes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.metrics import structural_similarity
from torch import Tensor, nn

from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.training_progress import ValidationScore
from quantkit.recovery.distill.trajectories import Teacher

#: Added to the training's seed; no run makes as many trajectories.
SEED_OFFSET = 1 << 30

Pictures = NDArray[np.float32]
#: Told the student's pictures and the teacher's, (P, H, W, 3) in [0, 1], and how near they are.
Viewer = Callable[[Pictures, Pictures, ValidationScore], None]

#: Prompts a picture: where there are fewer, prompts are not withheld from training, only seeds.
_SPARE = 16


def unseen(found: Pictures, expected: Pictures, score: ValidationScore) -> None:
    """Look at nothing."""
    del found, expected, score


def hold_out(prompts: Sequence[str], count: int) -> tuple[Sequence[str], Sequence[str]]:
    """Return the prompts of the training and those of the pictures.

    The last ones are held out where there are many, else all prompts train and the first ones are
    also looked at.
    """
    if len(prompts) >= _SPARE * count:
        return prompts[:-count], prompts[-count:]
    return prompts, prompts[:count]


class PictureWatcher:
    """Denoises prompts with a copy of the denoiser that takes the student's parameters."""

    def __init__(
        self,
        teacher: Teacher,
        name: str,
        prompts: Sequence[str],
        settings: DistillSettings,
        probe: nn.Module,
    ) -> None:
        """Make the teacher's pictures.

        Args:
            teacher: the pipeline.
            name: what the pipeline calls its denoiser.
            prompts: one picture each.
            settings: how pictures are sampled.
            probe: a copy of the denoiser, with the student's parameters, in the pipeline's dtype.
        """
        #: told the pictures of every look; never, without a VAE
        self.viewer: Viewer = unseen
        self._teacher = teacher
        self._name = name
        self._prompts = prompts
        self._settings = settings
        self._dense: nn.Module = getattr(teacher.pipe, name)
        self._probe = probe
        self._has_vae = getattr(teacher.pipe, "vae", None) is not None
        self._expected = self._make()

    def look(self, average: Mapping[str, Tensor]) -> ValidationScore:
        """Return the mean SSIM of the pictures; without a VAE, the latents' signal to noise."""
        with torch.no_grad():
            for name, value in self._probe.named_parameters():
                value.copy_(average[name])
        setattr(self._teacher.pipe, self._name, self._probe)
        try:
            found = self._make()
        finally:
            setattr(self._teacher.pipe, self._name, self._dense)
        if not self._has_vae:
            return compare_latents(found, self._expected)
        score = compare_pictures(found, self._expected)
        self.viewer(found, self._expected, score)
        return score

    def _make(self) -> Pictures:
        size = self._settings.sampling_batch
        # To record a student's steps takes longer than to take them.
        with self._teacher.awake(replays=False), torch.no_grad():
            parts = [self._denoise(start) for start in range(0, len(self._prompts), size)]
        return np.concatenate(parts)

    def _denoise(self, start: int) -> Pictures:
        prompts = list(self._prompts[start : start + self._settings.sampling_batch])
        first = self._settings.seed + SEED_OFFSET + start
        call = self._teacher.call(prompts, range(first, first + len(prompts)))
        call = replace(call, output="np" if self._has_vae else "latent")
        images: Any = self._teacher.pipe(**call.arguments(self._teacher.pipe)).images
        values = images.float().cpu().numpy() if isinstance(images, Tensor) else images
        return np.asarray(values, dtype=np.float32)


def compare_pictures(found: Pictures, expected: Pictures) -> ValidationScore:
    """Return the mean SSIM of pictures (P, H, W, 3) in [0, 1], rounded to 8 bit as in a report."""
    pairs = zip(*(np.round(255 * pictures) / 255 for pictures in (found, expected)), strict=True)
    scores = [
        structural_similarity(a, b, win_size=7, data_range=1.0, channel_axis=-1) for a, b in pairs
    ]
    return ValidationScore("SSIM", float(np.mean(scores)), tuple(map(float, scores)))


def compare_latents(found: Pictures, expected: Pictures) -> ValidationScore:
    """Return the power of the expected latents over that of the error, in dB."""
    error = float(np.square(found - expected).mean())
    power = float(np.square(expected).mean())
    return ValidationScore(
        "latents' SNR in dB", float(10 * np.log10(power / error)) if error else np.inf
    )
