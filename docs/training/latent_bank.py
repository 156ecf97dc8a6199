"""Latents of a fixed set of pictures and their captions, from which denoisers are trained.

Each picture is seen about seven times, every time with new noise, at a tenth of the cost of
encoding a new one.
"""

from dataclasses import dataclass

import torch
from quantkit.eval.world.scenes import draw_scenes
from torch import Generator, Tensor

from docs.training.tokens import CaptionEncoder
from docs.training.train_common import Options, frozen
from docs.training.train_vae import load_vae

_PICTURES = 655_360
_CHUNK = 2048
#: Share of captions replaced by the empty one.
_DROPPED = 0.1


@dataclass(frozen=True)
class LatentBank:
    """Latent distributions and captions of a fixed set of pictures."""

    mean: Tensor  #: (n, 4, 16, 16) float16, in the scale of the denoiser
    deviation: Tensor  #: of the same shape and dtype
    ids: Tensor  #: (n, 32) int16 token ids
    empty: Tensor  #: (1, 32) int64 token ids of the empty caption

    def draw(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return ``count`` random latents in float32 and the token ids of captions in int64.

        A tenth of the captions is the empty one, which guidance subtracts.
        """
        device = self.mean.device
        rows = torch.randint(len(self.mean), (count,), generator=generator, device=device)
        noise = torch.randn((count, *self.mean.shape[1:]), generator=generator, device=device)
        chance = torch.rand(count, 1, generator=generator, device=device)
        ids = torch.where(chance < _DROPPED, self.empty, self.ids[rows].long())
        return self.mean[rows] + self.deviation[rows] * noise, ids


def fill_bank(options: Options, generator: Generator) -> LatentBank:
    """Return the latents of new pictures, encoded by the trained VAE."""
    count = max(_CHUNK // 8, round(_PICTURES * options.scale))
    chunk = max(8, round(_CHUNK * options.batch_scale))
    paint, words = options.painter(), CaptionEncoder.of_world()
    means, deviations, ids = [], [], []
    with frozen(load_vae(options.out / "pipeline" / "vae", options.device)) as model:
        scale = model.config.scaling_factor
        encode = options.compile(model.encode)
        for _ in range(-(-count // chunk)):
            scenes = draw_scenes(chunk, generator)
            with torch.autocast(
                options.device.type, torch.bfloat16, enabled=options.device.type == "cuda"
            ):
                moments = encode(paint(scenes, generator)).latent_dist
            means.append((moments.mean * scale).half())
            deviations.append((moments.std * scale).half())
            ids.append(words.encode(scenes).to(torch.int16))
    empty = words.empty(1, options.device)
    return LatentBank(torch.cat(means), torch.cat(deviations), torch.cat(ids), empty)
