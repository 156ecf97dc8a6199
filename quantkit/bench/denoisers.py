"""The denoisers that are measured whole: configs as published, random weights, random inputs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.bench.denoiser_inputs import INPUTS
from quantkit.errors import ModelError
from quantkit.pipelines.running import quiet_libraries
from quantkit.storage.jsonfile import read_json

#: Where pipelines keep their denoisers.
_FOLDERS = ("unet", "transformer", "prior", "decoder")


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
        Denoiser(
            "sd15",
            "UNet2DConditionModel",
            {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
            "stable-diffusion-v1-5/stable-diffusion-v1-5, unet/config.json",
        ),
        Denoiser(
            "sd3",
            "SD3Transformer2DModel",
            {
                "sample_size": 128,
                "num_layers": 24,
                "attention_head_dim": 64,
                "num_attention_heads": 24,
                "caption_projection_dim": 1536,
                "pos_embed_max_size": 192,
            },
            "stabilityai/stable-diffusion-3-medium-diffusers, transformer/config.json",
        ),
        Denoiser(
            "pixart",
            "PixArtTransformer2DModel",
            {
                "sample_size": 128,
                "caption_channels": 4096,
                "interpolation_scale": 2,
                "use_additional_conditions": False,
            },
            "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS, transformer/config.json",
        ),
        Denoiser(
            "sana",
            "SanaTransformer2DModel",
            {},
            "Efficient-Large-Model/Sana_1600M_1024px_diffusers, transformer/config.json",
        ),
        Denoiser(
            "flux2",
            "Flux2Transformer2DModel",
            {},
            "black-forest-labs/FLUX.2-dev, transformer/config.json",
        ),
        Denoiser(
            "chroma",
            "ChromaTransformer2DModel",
            {},
            "lodestones/Chroma1-HD, transformer/config.json",
        ),
        Denoiser(
            "qwenimage",
            "QwenImageTransformer2DModel",
            {},
            "Qwen/Qwen-Image, transformer/config.json",
        ),
        Denoiser(
            "zimage",
            "ZImageTransformer2DModel",
            {},
            "Tongyi-MAI/Z-Image-Turbo, transformer/config.json",
        ),
        Denoiser(
            "wan",
            "WanTransformer3DModel",
            {},
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers, transformer/config.json",
        ),
        Denoiser(
            "ltx",
            "LTXVideoTransformer3DModel",
            {},
            "Lightricks/LTX-Video, transformer/config.json",
        ),
    )
}


def find_denoiser(text: str) -> Denoiser:
    """Return a row of DENOISERS, or what a directory's config.json describes.

    Args:
        text: a name, or a directory: a component's, or a pipeline's, of which one denoiser counts.

    Raises:
        ModelError: neither, or a class that has no inputs in INPUTS.
    """
    if text in DENOISERS:
        return DENOISERS[text]
    folder = Path(text)
    if not os.path.isdir(text):  # noqa: PTH112  Path's raises for names that are too long
        raise ModelError(f"{text:.200}: unknown, wanted {', '.join(DENOISERS)} or a directory")
    places = (folder, *(folder / name for name in _FOLDERS))
    path = next((p / "config.json" for p in places if (p / "config.json").is_file()), None)
    if path is None:
        raise ModelError(f"{folder}: no config.json, and none in its {', '.join(_FOLDERS)}")
    config = read_json(path)
    class_name = config.get("_class_name")
    if not isinstance(class_name, str) or class_name not in INPUTS:
        raise ModelError(
            f"{path}: class {class_name!s:.80}, wanted one whose inputs are known: "
            f"{', '.join(INPUTS)}"
        )
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
