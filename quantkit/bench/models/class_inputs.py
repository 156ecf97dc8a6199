"""Inputs of single classes of diffusers: what follows from no name and config alone."""

from typing import Any

import torch
from torch import Tensor

from quantkit.bench.models.input_call import Call, Maker


def _frames_first(call: Call) -> Tensor:
    """Return a video's latents, frames before channels."""
    return call.normal(call.batch, call.frames, call.width("in_channels"), call.size, call.size)


def _sound(call: Call) -> Tensor:
    return call.normal(call.batch, call.width("in_channels"), call.size)


def _none(_: Call) -> None:
    return None


# A token is 32 pixels wide, a quarter of what latents are elsewhere.
def _ltx_side(call: Call) -> int:
    return max(call.size // 4, 1)


def _llama(call: Call) -> Tensor:
    layers = len(call.config.llama_layers)
    return call.normal(layers, call.batch, 128, call.config.caption_channels[1])


def _allegro_places(call: Call) -> tuple[Any, ...]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    side = call.size // call.config.patch_size
    *freqs, _, _, _ = get_3d_rotary_pos_embed_allegro(
        embed_dim=call.config.attention_head_dim,
        crops_coords=((0, 0), (side, side)),
        grid_size=(side, side),
        temporal_size=call.frames,
        interpolation_scale=(1.0, 1.0, 1.0),
        device=call.device,
    )
    grid = (torch.arange(call.frames), torch.arange(side), torch.arange(side))
    places = torch.cartesian_prod(*grid).to(call.device)
    return freqs, places.T.reshape(3, 1, -1)


def _rotary(call: Call, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of no turn."""
    shape = (tokens, width)
    return torch.ones(shape, device=call.device), torch.zeros(shape, device=call.device)


def _resolution(call: Call) -> dict[str, Tensor] | None:
    expected = call.config.use_additional_conditions
    if expected is False or (expected is None and call.config.sample_size != 128):
        return None
    side = 8.0 * call.size
    return {"resolution": call.rows(side, side), "aspect_ratio": call.rows(1)}


#: Class -> parameter -> what is made for it.
CLASSES: dict[str, dict[str, Maker]] = {
    "AceStepTransformer1DModel": {
        "hidden_states": lambda call: call.normal(
            call.batch, call.size, call.config.audio_acoustic_hidden_dim
        ),
        "context_latents": lambda call: call.normal(
            call.batch,
            call.size,
            call.config.in_channels - call.config.audio_acoustic_hidden_dim,
        ),
    },
    "AllegroTransformer3DModel": {"image_rotary_emb": _allegro_places},
    "BriaFiboTransformer2DModel": {
        "text_encoder_layers": lambda call: (
            [call.normal(call.batch, call.tokens, call.config.text_encoder_dim)]
            * (call.config.num_layers + call.config.num_single_layers)
        ),
    },
    "CogVideoXTransformer3DModel": {"hidden_states": _frames_first},
    "CosmosTransformer3DModel": {
        "padding_mask": lambda call: call.normal(1, 1, call.size, call.size),
    },
    "DiTTransformer2DModel": {
        "class_labels": lambda call: call.numbers(
            call.batch, below=call.config.num_embeds_ada_norm
        ),
    },
    "ErnieImageTransformer2DModel": {
        "text_bth": Call.text,
        "text_lens": lambda call: torch.full((call.batch,), call.tokens, device=call.device),
    },
    "GlmImageTransformer2DModel": {
        "prior_token_id": lambda call: call.numbers(
            call.batch, call.side**2, below=call.config.prior_vq_quantizer_codebook_size
        ),
        "prior_token_drop": lambda call: ~call.seen(call.batch, call.side**2),
    },
    "HiDreamImageTransformer2DModel": {
        "img_ids": _none,
        "hidden_states": lambda call: call.normal(
            call.batch, call.width("in_channels"), call.size, call.size
        ),
        "encoder_hidden_states_t5": lambda call: call.normal(
            call.batch, 128, call.config.caption_channels[0]
        ),
        "encoder_hidden_states_llama3": _llama,
        "pooled_embeds": lambda call: call.normal(call.batch, call.config.text_emb_dim),
    },
    "HunyuanDiT2DModel": {
        "encoder_hidden_states": lambda call: call.normal(
            call.batch, call.config.text_len, call.config.cross_attention_dim
        ),
        "text_embedding_mask": lambda call: call.seen(call.batch, call.config.text_len),
        "encoder_hidden_states_t5": lambda call: call.normal(
            call.batch, call.config.text_len_t5, call.config.cross_attention_dim_t5
        ),
        "text_embedding_mask_t5": lambda call: call.seen(call.batch, call.config.text_len_t5),
        "image_meta_size": lambda call: call.rows(*[8.0 * call.size] * 4, 0, 0),
        "style": lambda call: call.numbers(call.batch, below=1),
        "image_rotary_emb": lambda call: _rotary(
            call,
            (call.size // call.config.patch_size) ** 2,
            call.config.attention_head_dim,
        ),
    },
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": lambda call: call.normal(
            call.batch, 256, call.config.text_embed_2_dim
        ),
        "encoder_attention_mask_2": lambda call: call.seen(call.batch, 256),
        # Of a video from text, none: zeros.
        "image_embeds": lambda call: call.normal(call.batch, 729, call.config.image_embed_dim) * 0,
    },
    "Kandinsky3UNet": {"encoder_attention_mask": Call.seen},
    "Kandinsky5Transformer3DModel": {
        "hidden_states": lambda call: call.normal(
            call.batch,
            call.frames,
            call.size,
            call.size,
            call.config.in_visual_dim * (2 if call.config.visual_cond else 1)
            + bool(call.config.visual_cond),
        ),
        "text_rope_pos": lambda call: call.numbers(call.tokens, below=call.tokens),
        "visual_rope_pos": lambda call: [
            torch.arange(n, device=call.device) for n in (call.frames, call.side, call.side)
        ],
    },
    "Krea2Transformer2DModel": {
        "encoder_hidden_states": lambda call: call.normal(
            call.batch, call.tokens, call.config.num_text_layers, call.config.text_hidden_dim
        ),
        "position_ids": lambda call: call.numbers(call.tokens + call.side**2, 3, below=call.side),
    },
    "LTXVideoTransformer3DModel": {
        "hidden_states": lambda call: call.normal(
            call.batch, call.frames * _ltx_side(call) ** 2, call.width("in_channels")
        ),
        "num_frames": lambda call: call.frames,
        "height": _ltx_side,
        "width": _ltx_side,
    },
    "LuminaNextDiT2DModel": {
        "encoder_mask": Call.seen,
        "cross_attention_kwargs": lambda _: {},
        "image_rotary_emb": lambda call: torch.ones(
            call.size,
            call.size,
            call.config.hidden_size // call.config.num_attention_heads // 2,
            dtype=torch.complex64,
            device=call.device,
        ),
    },
    "OmniGenTransformer2DModel": {
        "hidden_states": lambda call: call.normal(
            call.batch, call.width("in_channels"), call.size, call.size
        ),
        "input_ids": lambda call: call.numbers(
            call.batch, call.tokens, below=call.config.vocab_size
        ),
        "input_img_latents": lambda _: [],
        "input_image_sizes": lambda _: {},
        "attention_mask": lambda call: call.seen(
            call.batch, *[call.tokens + 1 + (call.size // call.config.patch_size) ** 2] * 2
        ).float(),
        "position_ids": lambda call: torch.arange(
            call.tokens + 1 + (call.size // call.config.patch_size) ** 2, device=call.device
        ).repeat(call.batch, 1),
    },
    "PixArtTransformer2DModel": {"added_cond_kwargs": _resolution},
    "PriorTransformer": {
        "hidden_states": lambda call: call.normal(call.batch, call.config.embedding_dim),
        "proj_embedding": lambda call: call.normal(call.batch, call.config.embedding_dim),
    },
    "StableAudioDiTModel": {
        "hidden_states": _sound,
        "global_hidden_states": lambda call: call.normal(
            call.batch, 1, call.config.global_states_input_dim
        ),
        "rotary_embedding": lambda call: _rotary(
            call, call.size + 1, call.config.attention_head_dim // 2
        ),
    },
    "StableCascadeUNet": {
        "clip_text_pooled": lambda call: call.normal(
            call.batch, 1, call.config.clip_text_pooled_in_channels
        ),
        "clip_text": lambda call: call.normal(
            call.batch, call.tokens, call.config.clip_text_in_channels
        ),
        "clip_img": lambda call: call.normal(call.batch, 1, call.config.clip_image_in_channels),
    },
    "UNetMotionModel": {
        "encoder_hidden_states": lambda call: call.text().repeat_interleave(call.frames, dim=0),
    },
    "UNetSpatioTemporalConditionModel": {
        "sample": _frames_first,
        "encoder_hidden_states": lambda call: call.normal(
            call.batch, 1, call.width("cross_attention_dim")
        ),
        "added_time_ids": lambda call: call.rows(6, 127, 0.02),
    },
    "UVit2DModel": {
        "input_ids": lambda call: call.numbers(
            call.batch, call.size, call.size, below=call.config.vocab_size
        ),
        "pooled_text_emb": lambda call: call.normal(call.batch, call.config.cond_embed_dim),
        "micro_conds": lambda call: call.rows(8.0 * call.size, 8.0 * call.size, 0, 0, 6),
    },
    "WanVACETransformer3DModel": {
        "control_hidden_states": lambda call: call.normal(
            call.batch, call.config.vace_in_channels, call.frames, call.size, call.size
        ),
        "control_hidden_states_scale": lambda call: torch.ones(
            len(call.config.vace_layers), device=call.device
        ).to(call.normal(1)),
    },
    "ZImageTransformer2DModel": {
        "x": lambda call: list(
            call.normal(call.batch, call.width("in_channels"), 1, call.size, call.size)
        ),
        "t": lambda call: call.full(0.5),
        "cap_feats": lambda call: list(
            call.normal(call.batch, call.tokens, call.config.cap_feat_dim)
        ),
    },
}
