"""The denoisers that are measured whole: configs as published, random weights, random inputs."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.pipelines.running import quiet_libraries
from quantkit.storage.jsonfile import read_json

#: Tokens of a prompt: CLIP's 77, and the 512 of FLUX.1-dev's T5.
_CLIP_TOKENS, _T5_TOKENS = 77, 512


@dataclass(frozen=True)
class Denoiser:
    """What to build."""

    #: as the user named it
    name: str
    #: of diffusers
    class_name: str
    #: as far as it differs from the class's defaults
    config: Mapping[str, Any]
    #: where the config is published
    source: str


DENOISERS: dict[str, Denoiser] = {
    denoiser.name: denoiser
    for denoiser in (
        Denoiser(
            "sdxl",
            "UNet2DConditionModel",
            {
                "sample_size": 128,
                "block_out_channels": [320, 640, 1280],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "transformer_layers_per_block": [1, 2, 10],
                "attention_head_dim": [5, 10, 20],
                "cross_attention_dim": 2048,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
                "use_linear_projection": True,
            },
            "stabilityai/stable-diffusion-xl-base-1.0, unet/config.json",
        ),
        Denoiser(
            "flux",
            "FluxTransformer2DModel",
            {"guidance_embeds": True},
            "black-forest-labs/FLUX.1-dev, transformer/config.json",
        ),
    )
}


def find_denoiser(text: str) -> Denoiser:
    """Return a row of DENOISERS, or what a directory's config.json describes.

    Args:
        text: a name, or a directory: a component's, or a pipeline's with unet or transformer.

    Raises:
        ModelError: neither, or a class that has no inputs in INPUTS.
    """
    if text in DENOISERS:
        return DENOISERS[text]
    folder = Path(text)
    if not os.path.isdir(text):  # noqa: PTH112  Path's raises for names that are too long
        raise ModelError(f"{text:.200}: unknown, wanted {', '.join(DENOISERS)} or a directory")
    places = (folder, folder / "unet", folder / "transformer")
    path = next((p / "config.json" for p in places if (p / "config.json").is_file()), None)
    if path is None:
        raise ModelError(f"{folder}: no config.json, and none in its unet or transformer")
    config = read_json(path)
    class_name = config.get("_class_name")
    if not isinstance(class_name, str) or class_name not in INPUTS:
        raise ModelError(f"{path}: class {class_name!s:.80}, wanted one of {', '.join(INPUTS)}")
    # What a packed or published config says beside the architecture.
    own = {k: v for k, v in config.items() if not k.startswith("_") and k != "quantization_config"}
    return Denoiser(text, class_name, own, str(path))


def build_denoiser(denoiser: Denoiser, device: torch.device) -> nn.Module:
    """Return the model in float16, made on the device with torch's own random weights.

    Raises:
        ModelError: the config does not describe such a model.
    """
    import diffusers

    build: Any = getattr(diffusers, denoiser.class_name).from_config
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        kept = [device] if device.type == "cuda" else []
        with quiet_libraries(), torch.random.fork_rng(kept), torch.device(device):
            torch.manual_seed(0)
            model: nn.Module = build(dict(denoiser.config))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{denoiser.source}: {' '.join(str(error).split())}") from error
    finally:
        torch.set_default_dtype(usual)
    # Some parts ask for float32 themselves; diffusers' own to() remarks on every cast.
    return nn.Module.to(model, device, torch.float16).eval().requires_grad_(False)


def make_inputs(model: nn.Module, batch: int, size: int, device: torch.device) -> dict[str, Any]:
    """Return keyword arguments of one denoising step.

    Args:
        batch: latents at once; 2 is one picture with guidance.
        size: width and height of the latents, an eighth of the picture's.

    Returns:
        float16 tensors on the device.
    """
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    return INPUTS[type(model).__name__](model.config, (batch, size), normal)


def _unet_inputs(
    config: Any, shape: tuple[int, int], normal: Callable[..., Tensor]
) -> dict[str, Any]:
    batch, size = shape
    inputs: dict[str, Any] = {
        "sample": normal(batch, config.in_channels, size, size),
        "encoder_hidden_states": normal(batch, _CLIP_TOKENS, config.cross_attention_dim),
    }
    device = inputs["sample"].device
    inputs["timestep"] = torch.full((), 500, device=device)
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        sizes = torch.tensor([8.0 * size] * 2 + [0.0] * 2 + [8.0 * size] * 2)
        inputs["added_cond_kwargs"] = {
            "text_embeds": normal(batch, pooled),
            "time_ids": sizes.repeat(batch, 1).to(device, torch.float16),
        }
    return inputs


def _flux_inputs(
    config: Any, shape: tuple[int, int], normal: Callable[..., Tensor]
) -> dict[str, Any]:
    batch, size = shape
    # Two by two latents are one token.
    side, axes = size // 2, len(config.axes_dims_rope)
    hidden = normal(batch, side * side, config.in_channels)
    device = hidden.device
    places = torch.zeros(side, side, axes)
    places[..., 1] += torch.arange(side)[:, None]
    places[..., 2] += torch.arange(side)[None, :]
    inputs = {
        "hidden_states": hidden,
        "encoder_hidden_states": normal(batch, _T5_TOKENS, config.joint_attention_dim),
        "pooled_projections": normal(batch, config.pooled_projection_dim),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=torch.float16),
        "img_ids": places.reshape(-1, axes).to(device, torch.float16),
        "txt_ids": torch.zeros(_T5_TOKENS, axes, device=device, dtype=torch.float16),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.full((batch,), 3.5, device=device, dtype=torch.float16)
    return inputs


#: Class -> its inputs, from config, (batch, size), and a maker of normal tensors.
INPUTS: dict[str, Callable[[Any, tuple[int, int], Callable[..., Tensor]], dict[str, Any]]] = {
    "UNet2DConditionModel": _unet_inputs,
    "FluxTransformer2DModel": _flux_inputs,
}
