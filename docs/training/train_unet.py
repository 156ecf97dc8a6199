"""Stage 4: the UNet on latents of fresh pictures, with the text states of the frozen CLIP."""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from docs.training.latent_bank import LatentBank, fill_bank
from docs.training.tokens import MAX_LENGTH
from docs.training.train_common import (
    HELD_OUT_SEED,
    Options,
    TrainingPlan,
    frozen,
    train,
)
from docs.training.world_models import (
    LATENT_CHANNELS,
    LATENT_SIDE,
    build_scheduler,
    build_unet,
)

PLAN = TrainingPlan(steps=9500, batch=512, rate=4e-4, warm_up=500, momentum=(0.9, 0.99))


def train_unet(options: Options) -> dict[str, Any]:
    """Train the UNet and write the rest of ``pipeline/``."""
    plan, device = options.fit_plan(PLAN), options.device
    torch.manual_seed(options.seed)
    generator = options.generator(4)
    text = _load_text(options).to(device)
    bank = fill_bank(options, generator)
    model = build_unet().to(device, memory_format=torch.channels_last).train()
    run, read = options.compile(model), options.compile(text)
    kept = build_scheduler().alphas_cumprod.to(device)

    def draw_loss() -> Tensor:
        latents, ids = bank.draw(plan.batch, generator)
        with torch.no_grad():
            states = read(input_ids=ids).last_hidden_state
        noise = torch.randn(latents.shape, generator=generator, device=device)
        steps = torch.randint(len(kept), (plan.batch,), generator=generator, device=device)
        signal, disturbance = (
            value.sqrt()[:, None, None, None] for value in (kept[steps], 1 - kept[steps])
        )
        noisy = (signal * latents + disturbance * noise).contiguous(
            memory_format=torch.channels_last
        )
        expected = signal * noise - disturbance * latents
        return functional.mse_loss(run(noisy, steps, states.detach()).sample.float(), expected)

    train("unet", model, draw_loss, plan, device)
    save_pipeline(options, model)
    held_out = Generator(device).manual_seed(HELD_OUT_SEED)
    parameters = sum(value.numel() for value in model.parameters())
    figures = {"steps": plan.steps, "batch": plan.batch, "parameters": parameters}
    return figures | {"gflop": gflop(), "bank": len(bank.mean), "bank_std": _spread(bank, held_out)}


def gflop() -> float:
    """Return 10**9 operations (two per multiply-add) of one forward pass for one picture."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # Fused attention is not counted on every version of torch; plain products are.
    plain = sdpa_kernel(SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as counter, frozen(build_unet()) as model:
        latents = torch.zeros(1, LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE)
        model(latents, 1, torch.zeros(1, MAX_LENGTH, model.config.cross_attention_dim))
    return float(counter.get_total_flops()) / 1e9


def save_pipeline(options: Options, unet: Any) -> None:
    """Write the UNet, the scheduler and the index that make ``pipeline/`` loadable."""
    from diffusers import AutoencoderKL, StableDiffusionPipeline
    from transformers import CLIPTokenizer

    directory = options.out / "pipeline"
    StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(directory / "vae").half(),
        text_encoder=_load_text(options).half(),
        tokenizer=CLIPTokenizer.from_pretrained(directory / "tokenizer"),
        unet=unet.cpu().half(),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(directory)


def _load_text(options: Options) -> Any:
    from transformers import CLIPTextModel

    folder = options.out / "pipeline" / "text_encoder"
    return CLIPTextModel.from_pretrained(folder).float().eval().requires_grad_(False)


def _spread(bank: LatentBank, generator: Generator) -> float:
    return bank.draw(min(4096, len(bank.mean)), generator)[0].std().item()
