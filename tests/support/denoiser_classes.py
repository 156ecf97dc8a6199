"""One literal row per denoiser class of diffusers: a tiny config.

Widths are multiples of 16, so that layers can be packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A class, and how to build a tiny model of it."""

    class_name: str
    config: Mapping[str, Any]


#: Two heads of 16: 32 wide.
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_UNET = {"sample_size": 8, "block_out_channels": (32, 32), "layers_per_block": 1}
_FLUX_CONFIG = {
    "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, **_HEADS,
    "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
_WAN_CONFIG = {
    "patch_size": (1, 2, 2), **_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 1, "rope_max_seq_len": 32,
}  # fmt: skip

ROWS = (
    Row(
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "in_channels": 24,
            "audio_acoustic_hidden_dim": 8, "patch_size": 2,
        },
    ),
    Row(
        "AllegroTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4,
            "out_channels": 4, "num_layers": 1, "cross_attention_dim": 48, "sample_width": 8,
            "sample_height": 8, "sample_frames": 2,
            "caption_channels": 32,
        },
    ),
    Row(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 1,
            "num_single_dit_layers": 1, **_HEADS, "caption_projection_dim": 32,
            "joint_attention_dim": 32, "pos_embed_max_size": 64,
        },
    ),
    Row(
        "BriaFiboTransformer2DModel",
        {**_FLUX_CONFIG, "text_encoder_dim": 32, "joint_attention_dim": 64},
    ),
    Row("BriaTransformer2DModel", {**_FLUX_CONFIG, "pooled_projection_dim": None}),
    Row(
        "ChromaTransformer2DModel",
        {**_FLUX_CONFIG, "approximator_num_channels": 8, "approximator_hidden_dim": 16,
         "approximator_layers": 1},
    ),
    Row(
        "ChronoEditTransformer3DModel",
        {**_WAN_CONFIG, "rope_temporal_skip_len": 8},
    ),
    Row(
        "CogVideoXTransformer3DModel",
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 32,
            "text_embed_dim": 32, "num_layers": 1, "sample_width": 8, "sample_height": 8,
            "sample_frames": 5, "max_text_seq_length": 6,
        },
    ),
    Row(
        "CogView3PlusTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 1, **_HEADS, "text_embed_dim": 32,
            "time_embed_dim": 32, "condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8,
        },
    ),
    Row(
        "CogView4Transformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 1, **_HEADS, "text_embed_dim": 32,
            "time_embed_dim": 32, "condition_dim": 4,
        },
    ),
    Row(
        "CosmosTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
            "attention_head_dim": 16, "num_layers": 1, "mlp_ratio": 2, "text_embed_dim": 32,
            "adaln_lora_dim": 16, "max_size": (8, 16, 16), "patch_size": (1, 2, 2),
        },
    ),
    Row(
        "DiTTransformer2DModel",
        {**_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 1, "sample_size": 8,
         "num_embeds_ada_norm": 8},
    ),
    Row(
        "DreamLiteUNetModel",
        {**_UNET, "block_out_channels": (32, 32, 32), "norm_num_groups": 8,
         "cross_attention_dim": 32, "attention_head_dim": 16},
    ),
    Row(
        "EasyAnimateTransformer3DModel",
        {
            **_HEADS, "in_channels": 4, "out_channels": 4, "mmdit_layers": 1, "num_layers": 2,
            "sample_height": 8, "sample_width": 8, "text_embed_dim": 32, "time_embed_dim": 32,
            "time_position_encoding_type": "3d_rope", "patch_size": 2,
        },
    ),
    Row(
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 32, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 64,
            "in_channels": 16, "out_channels": 16, "patch_size": 1, "text_in_dim": 32,
            "rope_axes_dim": (8, 4, 4),
        },
    ),
    Row(
        "Flux2Transformer2DModel",
        {**_FLUX_CONFIG, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32},
    ),
    Row(
        "FluxTransformer2DModel",
        {**_FLUX_CONFIG, "pooled_projection_dim": 32},
    ),
    Row(
        "GlmImageTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 1, **_HEADS, "text_embed_dim": 32,
            "time_embed_dim": 32, "condition_dim": 8, "prior_vq_quantizer_codebook_size": 64,
        },
    ),
    Row(
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1,
            "num_single_layers": 1, **_HEADS, "caption_channels": [32, 32], "text_emb_dim": 32,
            "num_routed_experts": 2, "num_activated_experts": 2, "axes_dims_rope": (8, 4, 4),
            "max_resolution": (8, 8), "llama_layers": (0, 1), "force_inference_output": True,
        },
    ),
    Row(
        "HunyuanDiT2DModel",
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, **_HEADS,
            "cross_attention_dim": 32, "cross_attention_dim_t5": 32, "pooled_projection_dim": 32,
            "hidden_size": 32, "text_len": 4, "text_len_t5": 4, "activation_fn": "gelu-approximate",
        },
    ),
    Row(
        "HunyuanImageTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, **_HEADS, "num_layers": 1, "num_single_layers": 1,
            "num_refiner_layers": 1, "text_embed_dim": 32, "rope_axes_dim": (8, 8),
        },
    ),
    Row(
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, **_HEADS, "num_layers": 1,
            "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 1, "patch_size_t": 1,
            "text_embed_dim": 32, "text_embed_2_dim": 32, "image_embed_dim": 16,
            "rope_axes_dim": (4, 4, 8), "target_size": 16, "task_type": "t2v",
        },
    ),
    Row(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, **_HEADS, "num_layers": 1, "num_single_layers": 1,
            "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "guidance_embeds": True,
            "text_embed_dim": 32, "pooled_projection_dim": 32, "rope_axes_dim": (4, 4, 8),
        },
    ),
    Row(
        "JoyImageEditTransformer3DModel",
        {
            "patch_size": [1, 2, 2], "in_channels": 16, "hidden_size": 32,
            "num_attention_heads": 2, "text_dim": 32, "num_layers": 1, "rope_dim_list": [4, 6, 6],
        },
    ),
    Row(
        "Kandinsky3UNet",
        {
            "time_embedding_dim": 32, "groups": 2, "attention_head_dim": 16, "layers_per_block": 2,
            "block_out_channels": (32, 32), "cross_attention_dim": 32,
            "encoder_hid_dim": 32,
        },
    ),
    Row(
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 32,
            "time_dim": 32, "model_dim": 32, "ff_dim": 64, "num_text_blocks": 1,
            "num_visual_blocks": 1, "axes_dims": (4, 6, 6),
        },
    ),
    Row(
        "Krea2Transformer2DModel",
        {
            "in_channels": 16, "num_layers": 1, **_HEADS, "num_key_value_heads": 1,
            "intermediate_size": 64, "timestep_embed_dim": 32, "text_hidden_dim": 32,
            "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 1,
            "text_intermediate_size": 32, "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1, "axes_dims_rope": (8, 4, 4),
        },
    ),
    Row(
        "LatteTransformer3DModel",
        {
            "sample_size": 8, "num_layers": 1, "patch_size": 2, **_HEADS, "caption_channels": 32,
            "in_channels": 4, "cross_attention_dim": 32, "out_channels": 8, "attention_bias": True,
            "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "video_length": 2,
        },
    ),
    Row(
        "LongCatImageTransformer2DModel",
        {**_FLUX_CONFIG, "pooled_projection_dim": 32},
    ),
    Row(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 16, "out_channels": 16, **_HEADS, "cross_attention_dim": 32,
            "num_layers": 1, "caption_channels": 32,
        },
    ),
    Row(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 48, "num_layers": 1,
            "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1,
            "multiple_of": 16, "axes_dim_rope": (8, 4, 4), "axes_lens": (1024, 32, 32),
            "cap_feat_dim": 32,
        },
    ),
    Row(
        "LuminaNextDiT2DModel",
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "learn_sigma": False,
            "cross_attention_dim": 32,
        },
    ),
    Row(
        "MochiTransformer3DModel",
        {
            **_HEADS, "num_layers": 2, "pooled_projection_dim": 32, "in_channels": 4,
            "text_embed_dim": 32, "time_embed_dim": 32, "max_sequence_length": 6,
        },
    ),
    Row(
        "NucleusMoEImageTransformer2DModel",
        {
            "in_channels": 16, "out_channels": 4, "num_layers": 2, **_HEADS, "mlp_ratio": 8.0,
            "joint_attention_dim": 32, "axes_dims_rope": (8, 4, 4), "moe_enabled": True,
            "num_experts": 4, "dense_moe_strategy": "leave_first_block_dense",
            "moe_intermediate_dim": 32, "capacity_factors": [2.0, 2.0],
        },
    ),
    Row(
        "OmniGenTransformer2DModel",
        {
            "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 64, "num_layers": 2, "pad_token_id": 0, "vocab_size": 100,
            "in_channels": 4, "time_step_dim": 32,
            "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        },
    ),
    Row("OvisImageTransformer2DModel", {**_FLUX_CONFIG, "out_channels": 16}),
    Row(
        "PixArtTransformer2DModel",
        {
            **_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 1,
            "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8,
            "use_additional_conditions": False,
        },
    ),
    Row(
        "PriorTransformer",
        {**_HEADS, "num_layers": 1, "embedding_dim": 32, "num_embeddings": 6,
         "additional_embeddings": 4},
    ),
    Row(
        "PRXTransformer2DModel",
        {
            "in_channels": 4, "patch_size": 2, "context_in_dim": 32, "hidden_size": 32,
            "mlp_ratio": 2.0, "num_heads": 2, "depth": 1, "axes_dim": [8, 8],
        },
    ),
    Row(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, **_HEADS,
            "joint_attention_dim": 32, "axes_dims_rope": (8, 4, 4),
        },
    ),
    Row(
        "SanaTransformer2DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 1, **_HEADS,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
            "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8,
        },
    ),
    Row(
        "SanaVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, **_HEADS, "num_layers": 1,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
            "cross_attention_dim": 32, "caption_channels": 32, "mlp_ratio": 2, "sample_size": 8,
            "rope_max_seq_len": 32,
        },
    ),
    Row(
        "SD3Transformer2DModel",
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, **_HEADS,
            "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 32,
            "pos_embed_max_size": 8,
        },
    ),
    Row("SkyReelsV2Transformer3DModel", _WAN_CONFIG),
    Row(
        "StableAudioDiTModel",
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 1, **_HEADS,
            "num_key_value_attention_heads": 2, "cross_attention_dim": 32, "time_proj_dim": 32,
            "global_states_input_dim": 32, "cross_attention_input_dim": 32,
        },
    ),
    Row(
        "StableCascadeUNet",
        {
            "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 32,
            "conditioning_dim": 32, "block_out_channels": (32, 64), "num_attention_heads": (2, 4),
            "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1),
            "clip_text_in_channels": 32, "clip_text_pooled_in_channels": 32,
            "clip_image_in_channels": 32,
        },
    ),
    Row(
        "Transformer2DModel",
        {**_HEADS, "in_channels": 32, "num_layers": 1, "norm_num_groups": 8,
         "cross_attention_dim": 32, "norm_type": "layer_norm"},
    ),
    Row(
        "UNet2DConditionModel",
        {
            **_UNET, "norm_num_groups": 8, "cross_attention_dim": 32, "attention_head_dim": 2,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
    ),
    Row(
        "UNet2DModel",
        {
            **_UNET, "norm_num_groups": 8, "in_channels": 4, "out_channels": 4,
            "attention_head_dim": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
    ),
    Row(
        "UNet3DConditionModel",
        {
            **_UNET, "norm_num_groups": 8, "cross_attention_dim": 32, "attention_head_dim": 16,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
    ),
    Row(
        "UNetMotionModel",
        {
            **_UNET, "norm_num_groups": 8, "cross_attention_dim": 32, "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        },
    ),
    Row(
        "UNetSpatioTemporalConditionModel",
        {
            **_UNET, "in_channels": 4, "cross_attention_dim": 32, "num_attention_heads": (2, 2),
            "addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 96,
            "down_block_types": (
                "CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal",
            ),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "num_frames": 2,
        },
    ),
    Row(
        "UVit2DModel",
        {
            "hidden_size": 32, "cond_embed_dim": 32, "micro_cond_encode_dim": 16,
            "micro_cond_embed_dim": 80, "encoder_hidden_size": 32, "vocab_size": 32,
            "codebook_size": 24, "in_channels": 32, "block_out_channels": 32, "num_res_blocks": 1,
            "block_num_heads": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64, "sample_size": 4,
        },
    ),
    Row("WanTransformer3DModel", _WAN_CONFIG),
    Row(
        "WanVACETransformer3DModel",
        {**_WAN_CONFIG, "num_layers": 2, "vace_layers": [0], "vace_in_channels": 12},
    ),
    Row(
        "ZImageTransformer2DModel",
        {
            "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 32,
            "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": 32, "axes_dims": [8, 4, 4], "axes_lens": [1024, 32, 32],
        },
    ),
)  # fmt: skip
