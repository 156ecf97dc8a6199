"""Write keys_*.json.gz: the tensors and modules of published denoisers, without their weights.

``python tests/golden/make_keys.py`` builds each model on the meta device from the config that its
authors published on the hub, as far as it differs from the class's defaults, and checks its number
of parameters against the published one. The files were made with diffusers 0.42.1, torch 2.15.0.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).parent

#: name -> (where the config is published, class, config, parameters)
MODELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "sd15": (
        "stable-diffusion-v1-5/stable-diffusion-v1-5, unet",
        "UNet2DConditionModel",
        {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
        859_520_964,
    ),
    "sdxl": (
        "stabilityai/stable-diffusion-xl-base-1.0, unet",
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
        2_567_463_684,
    ),
    "sd3_medium": (
        "stabilityai/stable-diffusion-3-medium-diffusers, transformer",
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 192,
        },
        2_028_328_000,
    ),
    "sd35_medium": (
        "stabilityai/stable-diffusion-3.5-medium, transformer",
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)),
            "qk_norm": "rms_norm",
        },
        # 2.47e9 are published, which counts the 226,492,416 of pos_embed, a buffer.
        2_243_171_520,
    ),
    "sd35_large": (
        "stabilityai/stable-diffusion-3.5-large, transformer",
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "num_layers": 38,
            "attention_head_dim": 64,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        8_056_627_520,
    ),
    "flux1_dev": (
        "black-forest-labs/FLUX.1-dev, transformer",
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        11_901_408_320,
    ),
    "pixart_sigma": (
        "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS, transformer",
        "PixArtTransformer2DModel",
        {
            "sample_size": 128,
            "caption_channels": 4096,
            "interpolation_scale": 2,
            "use_additional_conditions": False,
        },
        610_856_096,
    ),
    "sana_1600m": (
        "Efficient-Large-Model/Sana_1600M_1024px_diffusers, transformer",
        "SanaTransformer2DModel",
        {},
        1_604_462_752,
    ),
    "flux2_dev": (
        "black-forest-labs/FLUX.2-dev, transformer",
        "Flux2Transformer2DModel",
        {},
        # 32e9 are published.
        32_223_281_152,
    ),
    "chroma1_hd": (
        "lodestones/Chroma1-HD, transformer",
        "ChromaTransformer2DModel",
        {},
        # 8.9e9 are published.
        8_899_983_424,
    ),
    "qwen_image": (
        "Qwen/Qwen-Image, transformer",
        "QwenImageTransformer2DModel",
        {},
        # 20e9 are published.
        20_430_401_088,
    ),
    "z_image": (
        "Tongyi-MAI/Z-Image-Turbo, transformer",
        "ZImageTransformer2DModel",
        {},
        # 6e9 are published.
        6_154_908_736,
    ),
    "wan22_t2v_14b": (
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers, transformer and transformer_2",
        "WanTransformer3DModel",
        {},
        # 14e9 are published.
        14_288_491_584,
    ),
    "wan21_i2v_14b": (
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers, transformer",
        "WanTransformer3DModel",
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        # 16e9 in its files, 14e9 by its name.
        16_394_878_784,
    ),
    "ltx_video": (
        "Lightricks/LTX-Video, transformer",
        "LTXVideoTransformer3DModel",
        {},
        # 2e9 are published.
        1_923_385_472,
    ),
}


def describe(name: str) -> dict[str, object]:
    """Return the modules and tensors of one model."""
    import diffusers

    source, class_name, config, parameters = MODELS[name]
    with torch.device("meta"):
        model = getattr(diffusers, class_name)(**config)
    found = sum(p.numel() for p in model.parameters())
    assert parameters == found, f"{name}: {found} parameters, published {parameters}"
    return {
        "source": source,
        "class_name": class_name,
        "config": config,
        "parameters": found,
        "tensors": {key: list(value.shape) for key, value in model.state_dict().items()},
        "modules": {
            path: [type(module).__name__, getattr(module, "groups", 1), module.bias is not None]
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
        },
    }


if __name__ == "__main__":
    for name in MODELS:
        text = json.dumps(describe(name), separators=(",", ":")).encode()
        path = GOLDEN / f"keys_{name}.json.gz"
        path.write_bytes(gzip.compress(text, mtime=0))
