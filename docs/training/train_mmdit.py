"""Stage 6: an MMDiT on the latents of the UNet's stage, by rectified flow, with CLIP's text states.

A second denoiser of the same world, so that no format is tuned on one architecture alone. The
repository holds its transformer; VAE, CLIP and tokenizer are those of the bundled pipeline:

    python -m docs.training.train_mmdit DIR  # writes the whole StableDiffusion3Pipeline
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from docs.training.latent_bank import fill_bank
from docs.training.tokens import MAX_LENGTH
from docs.training.train_common import Options, TrainingPlan, train
from docs.training.world_models import build_mmdit

PLAN = TrainingPlan(steps=11_000, batch=256, rate=6e-4, warm_up=500, momentum=(0.9, 0.99))
#: Tokens of the T5, which are all zero.
_EMPTY_TOKENS = 256

_ROOT = Path(__file__).parents[2]


class _TextStates(nn.Module):
    """What StableDiffusion3Pipeline makes of a caption with two encoders that are the same."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return states (B, 32 + 256, 2 W) and pooled states (B, 2 W) of ids (B, 32)."""
        found = self.clip(input_ids=ids, output_hidden_states=True)
        states, pooled = found.hidden_states[-2], found.text_embeds
        states = torch.cat((states, states), dim=-1)
        return functional.pad(states, (0, 0, 0, _EMPTY_TOKENS)), torch.cat((pooled, pooled), dim=-1)


def train_mmdit(options: Options) -> dict[str, Any]:
    """Train the transformer and write it to ``mmdit/transformer``."""
    plan, device = options.fit_plan(PLAN), options.device
    torch.manual_seed(options.seed)
    generator = options.generator(5)
    text = _TextStates(_load_text(options.out)).to(device)
    bank = fill_bank(options, generator)
    model = build_mmdit().to(device).train()
    run, read = options.compile(model), options.compile(text)

    def draw_loss() -> Tensor:
        latents, ids = bank.draw(plan.batch, generator)
        with torch.no_grad():
            states, pooled = read(ids)
        noise = torch.randn(latents.shape, generator=generator, device=device)
        # More of the middle, where the answer is hardest (Esser et al. 2024, arXiv:2403.03206).
        sigma = torch.randn(plan.batch, generator=generator, device=device).sigmoid()
        share = sigma[:, None, None, None]
        answer = run((1 - share) * latents + share * noise, states, pooled, 1000 * sigma).sample
        return functional.mse_loss(answer.float(), noise - latents)

    train("mmdit", model, draw_loss, plan, device)
    model.cpu().half().save_pretrained(options.out / "mmdit" / "transformer")
    parameters = sum(value.numel() for value in model.parameters())
    return {"steps": plan.steps, "batch": plan.batch, "parameters": parameters}


def assemble(assets: Path, transformer: Path, directory: Path) -> None:
    """Write the whole pipeline: the transformer with the other models of the bundled pipeline."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTokenizer

    vae = AutoencoderKL.from_pretrained(assets / "pipeline" / "vae", torch_dtype=torch.float16)
    vae.register_to_config(shift_factor=0.0)
    tokenizer = CLIPTokenizer.from_pretrained(assets / "pipeline" / "tokenizer")
    text = _load_text(assets).half()
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel.from_pretrained(transformer, torch_dtype=torch.float16),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        text_encoder_2=text,
        tokenizer_2=tokenizer,
        text_encoder_3=_silent_t5(len(tokenizer)),
        tokenizer_3=tokenizer,
    ).save_pretrained(directory)


def _silent_t5(tokens: int) -> Any:
    """Return a T5 encoder of zeros: StableDiffusion3Pipeline does not load without one."""
    from transformers import T5Config, T5EncoderModel

    width = build_mmdit().config.joint_attention_dim
    config = T5Config(
        vocab_size=tokens, d_model=width, d_kv=8, d_ff=8, num_layers=1, num_heads=1, pad_token_id=0
    )
    model = T5EncoderModel(config)
    nn.init.zeros_(model.encoder.final_layer_norm.weight)
    return model.half().eval()


def _load_text(assets: Path) -> Any:
    from transformers import CLIPTextModelWithProjection

    model = CLIPTextModelWithProjection.from_pretrained(assets / "clip")
    assert model.config.max_position_embeddings == MAX_LENGTH
    return model.float().eval().requires_grad_(False)


def main() -> None:
    """Write the pipeline to the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path)
    transformer = _ROOT / "docs" / "training" / "mmdit" / "transformer"
    assemble(_ROOT / "eval" / "assets", transformer, parser.parse_args().directory)


if __name__ == "__main__":
    main()
