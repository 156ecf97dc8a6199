"""Text encoders with random weights, one of every kind that published pipelines have."""

from typing import Any

import torch

_LM = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_T5 = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
_CLIP = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "bos_token_id": 62,
    "eos_token_id": 63, "pad_token_id": 63, "projection_dim": 32,
}  # fmt: skip
_GATED = {"feed_forward_proj": "gated-gelu"}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                "out_hidden_size": 64, "fullatt_block_indexes": [0]}  # fmt: skip
_PIXTRAL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
_SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip

#: class name -> (config class, its arguments)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5EncoderModel": ("T5Config", {**_T5, **_GATED}),
    "UMT5EncoderModel": ("UMT5Config", {**_T5, **_GATED}),
    "CLIPTextModel": ("CLIPTextConfig", _CLIP),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", _CLIP),
    "LlamaForCausalLM": ("LlamaConfig", {**_LM, "tie_word_embeddings": False}),
    "Gemma2Model": ("Gemma2Config", _LM),
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"text_config": _LM, "vision_config": _SIGLIP, "mm_tokens_per_image": 1},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_LM, "tie_word_embeddings": True}),
    "MistralModel": ("MistralConfig", _LM),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"text_config": {"model_type": "mistral", **_LM}, "vision_config": _PIXTRAL},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {"text_config": {**_LM, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
         "vision_config": _QWEN_VISION},
    ),
    # Without a row of its own.
    "BertModel": (
        "BertConfig",
        {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 32},
    ),
}  # fmt: skip


def make_encoder(class_name, **changes):
    """Return a model with random weights whose embeddings depend on all of its layers."""
    import transformers

    config_class, values = ENCODERS[class_name]
    torch.manual_seed(1)
    config = getattr(transformers, config_class)(**{**values, **changes})
    return getattr(transformers, class_name)(config).eval()


def encoder_class(class_name):
    """Return the class of a row of ENCODERS."""
    import transformers

    return getattr(transformers, class_name)


def embed(model, rows=2):
    """Return what a pipeline takes of a prompt: the last hidden states, float32."""
    ids = torch.randint(3, 60, (rows, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(ids, output_hidden_states=True)
    return found.hidden_states[-1].float()
