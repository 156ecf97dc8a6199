"""The shapes of the bundled models. Every channel count is a multiple of 32.

Thirty-two is the K of one sparse FP8 matrix instruction, so that every layer but the ones that
meet pictures or latents can be packed. Together the models fill what the repository can carry in
fp16, about 15 million parameters, more than half of it in the UNet.
"""

from typing import Any

from docs.training.tokens import (
    MAX_LENGTH,
    START,
    CaptionEncoder,
    vocabulary,
    world_words,
)

#: Width of the text states, which is the K of the UNet's cross attention.
_TEXT_WIDTH = 128
#: Mean and deviation with which CLIP's image processor turns [0, 1] into [-1, 1].
PIXEL_MEAN, PIXEL_STD = 0.5, 0.5
#: Latents are 16 x 16 x 4 for pictures of 64 x 64.
LATENT_SIDE, LATENT_CHANNELS = 16, 4

#: The image processor's file; written out because its class differs between transformers 4 and 5.
IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 64, "width": 64},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [PIXEL_MEAN] * 3,
    "image_std": [PIXEL_STD] * 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 64},
}


def build_clip() -> Any:
    """Return an untrained CLIPModel: text of 4 layers, vision of 5 on patches of 8 pixels."""
    from transformers import CLIPConfig, CLIPModel

    tokens = vocabulary(world_words())
    end = CaptionEncoder.of_world().empty(1, "cpu")[0, 1].item()
    text = {
        "vocab_size": len(tokens),
        "hidden_size": _TEXT_WIDTH,
        "intermediate_size": 4 * _TEXT_WIDTH,
        "projection_dim": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": tokens[START],
        "eos_token_id": end,
        "pad_token_id": end,
    }
    vision = {
        "hidden_size": 192,
        "intermediate_size": 768,
        "projection_dim": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "image_size": 64,
        "patch_size": 8,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=128))


def build_vae() -> Any:
    """Return an untrained AutoencoderKL: 64 x 64 x 3 to 16 x 16 x 4 and back."""
    from diffusers import AutoencoderKL

    widths = (64, 96, 96)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=LATENT_CHANNELS,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        norm_num_groups=32,
        sample_size=64,
        force_upcast=False,
    )


def build_unet() -> Any:
    """Return an untrained UNet2DConditionModel in Stable Diffusion's layout, at 16 x 16 latents.

    Attention stands at 16 x 16, 8 x 8 and in the middle, with heads of 32 channels.
    """
    from diffusers import UNet2DConditionModel

    widths = (96, 128, 160)
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=_TEXT_WIDTH,
        # Despite its name this is the number of heads.
        attention_head_dim=tuple(width // 32 for width in widths),
        norm_num_groups=32,
    )


def build_mmdit() -> Any:
    """Return an untrained SD3Transformer2DModel: 6 joint blocks, 5 heads of 32 channels."""
    from diffusers import SD3Transformer2DModel

    heads, channels = 5, 32
    return SD3Transformer2DModel(
        sample_size=LATENT_SIDE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=channels,
        num_attention_heads=heads,
        caption_projection_dim=heads * channels,
        # Of two text encoders, whose states stand next to each other.
        joint_attention_dim=2 * _TEXT_WIDTH,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=LATENT_SIDE // 2,
        qk_norm="rms_norm",
    )


def build_scheduler() -> Any:
    """Return the DDIM scheduler of training and of sampling: v-prediction, zero terminal SNR.

    Source: Lin et al. 2023, arXiv:2305.08891; Salimans and Ho 2022, arXiv:2202.00512.
    """
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )
