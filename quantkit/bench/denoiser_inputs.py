"""What the denoisers that are measured are called with: one row per class."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: batch, and the side of the latents
Shape: TypeAlias = tuple[int, int]
#: maker of normal float16 tensors on the device
Normal: TypeAlias = Callable[..., Tensor]

#: Tokens of a prompt: CLIP's 77, the 512 of FLUX.1-dev's T5, the 300 of PixArt's and Sana's.
_CLIP_TOKENS, _T5_TOKENS, _SHORT_TOKENS = 77, 512, 300
#: Frames of a video's latents: 17 frames of pictures, at four a frame.
_FRAMES = 5


def _unet_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
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


def _flux_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    inputs = _places(config, shape, normal, config.joint_attention_dim)
    inputs["pooled_projections"] = normal(shape[0], config.pooled_projection_dim)
    if config.guidance_embeds:
        inputs["guidance"] = torch.full_like(inputs["timestep"], 3.5)
    return inputs


def _flux2_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    inputs = _places(config, shape, normal, config.joint_attention_dim)
    inputs["guidance"] = torch.full_like(inputs["timestep"], 3.5)
    return inputs


def _chroma_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    return _places(config, shape, normal, config.joint_attention_dim)


def _places(config: Any, shape: Shape, normal: Normal, text: int) -> dict[str, Any]:
    """Return tokens of a picture and of a text, with their places."""
    batch, size = shape
    side, axes = size // 2, len(config.axes_dims_rope)
    hidden = normal(batch, side * side, config.in_channels)
    places = torch.zeros(side, side, axes)
    places[..., 1] += torch.arange(side)[:, None]
    places[..., 2] += torch.arange(side)[None, :]
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": normal(batch, _T5_TOKENS, text),
        "timestep": hidden.new_full((batch,), 0.5),
        "img_ids": places.reshape(-1, axes).to(hidden),
        "txt_ids": hidden.new_zeros(_T5_TOKENS, axes),
    }


def _sd3_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    batch, size = shape
    hidden = normal(batch, config.in_channels, size, size)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": normal(batch, 256 + _CLIP_TOKENS, config.joint_attention_dim),
        "pooled_projections": normal(batch, config.pooled_projection_dim),
        "timestep": hidden.new_full((batch,), 500.0),
    }


def _caption_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    batch, size = shape
    hidden = normal(batch, config.in_channels, size, size)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": normal(batch, _SHORT_TOKENS, config.caption_channels),
        "timestep": hidden.new_full((batch,), 500.0),
    }


def _qwen_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    batch, side = shape[0], shape[1] // 2
    hidden = normal(batch, side * side, config.in_channels)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": normal(batch, _T5_TOKENS, config.joint_attention_dim),
        "timestep": hidden.new_full((batch,), 0.5),
        "img_shapes": [[(1, side, side)]] * batch,
    }


def _z_image_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    batch, size = shape
    hidden = normal(batch, config.in_channels, 1, size, size)
    return {
        "x": list(hidden),
        "t": hidden.new_full((batch,), 0.5),
        "cap_feats": list(normal(batch, _T5_TOKENS, config.cap_feat_dim)),
    }


def _wan_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    batch, size = shape
    hidden = normal(batch, config.in_channels, _FRAMES, size, size)
    inputs = {
        "hidden_states": hidden,
        "encoder_hidden_states": normal(batch, _T5_TOKENS, config.text_dim),
        "timestep": hidden.new_full((batch,), 500.0),
    }
    if config.image_dim is not None:
        # Tokens of CLIP ViT-H/14.
        inputs["encoder_hidden_states_image"] = normal(batch, 257, config.image_dim)
    return inputs


def _ltx_inputs(config: Any, shape: Shape, normal: Normal) -> dict[str, Any]:
    # A token is 32 pixels wide, a quarter of what latents are elsewhere.
    batch, side = shape[0], max(shape[1] // 4, 1)
    hidden = normal(batch, _FRAMES * side * side, config.in_channels)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": normal(batch, 128, config.caption_channels),
        "encoder_attention_mask": torch.ones(batch, 128, device=hidden.device),
        "timestep": hidden.new_full((batch,), 500.0),
        "num_frames": _FRAMES,
        "height": side,
        "width": side,
    }


#: Class -> its inputs, from config, shape and a maker of normal tensors.
INPUTS: dict[str, Callable[[Any, Shape, Normal], dict[str, Any]]] = {
    "UNet2DConditionModel": _unet_inputs,
    "FluxTransformer2DModel": _flux_inputs,
    "Flux2Transformer2DModel": _flux2_inputs,
    "ChromaTransformer2DModel": _chroma_inputs,
    "SD3Transformer2DModel": _sd3_inputs,
    "PixArtTransformer2DModel": _caption_inputs,
    "SanaTransformer2DModel": _caption_inputs,
    "QwenImageTransformer2DModel": _qwen_inputs,
    "ZImageTransformer2DModel": _z_image_inputs,
    "WanTransformer3DModel": _wan_inputs,
    "LTXVideoTransformer3DModel": _ltx_inputs,
}
