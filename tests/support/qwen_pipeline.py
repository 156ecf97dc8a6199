"""A tiny Qwen-Image pipeline with random weights: a transformer, a language model, a video VAE."""

from pathlib import Path

import torch


def tiny_qwen_pipeline(path: Path, *, seed: int = 0) -> Path:
    """Write a QwenImagePipeline in bfloat16 to ``path`` and return it."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = diffusers.QwenImagePipeline(
            transformer=_transformer(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=_vae(),
            text_encoder=_language_model(),
            tokenizer=_tokenizer(),
        )
    pipe.to(torch.bfloat16).save_pretrained(path)
    return path


def _transformer() -> torch.nn.Module:
    import diffusers

    return diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        axes_dims_rope=(8, 12, 12),
    )


def _vae() -> torch.nn.Module:
    import diffusers

    return diffusers.AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


def _language_model() -> torch.nn.Module:
    import transformers

    size = len(_vocabulary())
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
            "rope_theta": 1_000_000.0,
            "max_position_embeddings": 2048,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _tokenizer() -> object:
    import transformers

    return transformers.Qwen2Tokenizer(vocab=_vocabulary(), merges=[])


def _vocabulary() -> dict[str, int]:
    """Return a token for every byte, as byte-level BPE writes them, and the chat's own."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {token: index for index, token in enumerate(tokens)}
