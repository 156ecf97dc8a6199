"""Stage 2: the autoencoder, pixel and gradient losses with a small KL term."""

from pathlib import Path
from typing import Any

import torch
from quantkit.eval.world.scenes import draw_scenes
from torch import Generator, Tensor

from docs.training.render import draw_pictures
from docs.training.train_common import (
    HELD_OUT_SEED,
    Options,
    TrainingPlan,
    frozen,
    train,
)
from docs.training.world_models import build_vae

PLAN = TrainingPlan(steps=3800, batch=256, rate=1e-3, warm_up=200, momentum=(0.9, 0.99))
#: Weight of the KL term per latent number: enough to keep latents near unit scale, no more.
_KL = 1e-4
_SQUARED, _EDGES = 2.0, 0.25


def train_vae(options: Options) -> dict[str, Any]:
    """Train the autoencoder and write ``pipeline/vae`` with its scaling factor."""
    plan, device = options.fit_plan(PLAN), options.device
    torch.manual_seed(options.seed)
    model = build_vae().to(device, memory_format=torch.channels_last).train()
    generator, paint = options.generator(2), options.painter()

    def rebuild(pictures: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.encode(pictures).latent_dist
        return model.decode(posterior.sample()).sample, posterior.kl() / posterior.mean[0].numel()

    run = options.compile(rebuild)

    def draw_loss() -> Tensor:
        pictures = paint(draw_scenes(plan.batch, generator), generator)
        rebuilt, kl = run(pictures.contiguous(memory_format=torch.channels_last))
        error = rebuilt.float() - pictures
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        pixels = error.abs().mean() + _SQUARED * error.square().mean()
        loss: Tensor = pixels + _EDGES * edges + _KL * kl.float().mean()
        return loss

    train("vae", model, draw_loss, plan, device)
    pictures = 2 * draw_pictures(1024, Generator().manual_seed(HELD_OUT_SEED))[1] - 1
    with frozen(model):
        parts = torch.split(pictures, 128)
        moments = [model.encode(part.to(device)).latent_dist for part in parts]
        spread = torch.cat([part.sample() for part in moments]).std().item()
    model.register_to_config(scaling_factor=1 / spread)
    directory = options.out / "pipeline" / "vae"
    model.half().save_pretrained(directory)
    figures = {"steps": plan.steps, "batch": plan.batch, "latent_std": spread}
    return figures | {"psnr_db": psnr(directory, pictures, device)}


def load_vae(directory: Path, device: torch.device) -> Any:
    """Return the saved autoencoder in float32."""
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(directory).float().to(device).eval()


def psnr(directory: Path, pictures: Tensor, device: torch.device) -> float:
    """Return the PSNR in dB of the mean squared error over all pictures, clamped and rounded.

    Args:
        directory: the saved autoencoder.
        pictures: (n, 3, 64, 64) in [-1, 1].
        device: where to compute.
    """
    squared = []
    with frozen(load_vae(directory, device)) as model:
        for part in torch.split(pictures.to(device), 128):
            rebuilt = model.decode(model.encode(part).latent_dist.mode()).sample.clamp(-1, 1)
            shown = torch.round((rebuilt + 1) * 127.5) / 127.5 - 1
            squared.append(((shown - part) / 2).square().mean((1, 2, 3)))
    return -10 * torch.cat(squared).double().mean().log10().item()
