"""One literal row per family of text encoders: what stays in 16 bit and why, and what is no layer.

Rows follow the names in published files, which transformers may rename while it loads them. An
encoder without a row takes the last one: there the model that transformers builds says what is a
layer, and usual names say what stays.
"""

from quantkit.models.family import Family, Keep

_LOGITS = "writes logits over the vocabulary, often with the embedding's own weight"
_POOLED = "projects one pooled row per prompt, which conditions every block"
_PICTURES = "reads pictures, not the prompt"
_DECODER = "a decoder, which no pipeline calls"

TEXT_ENCODERS: tuple[Family, ...] = (
    Family(
        "t5",
        ("T5EncoderModel", "UMT5EncoderModel"),
        keep=(Keep("decoder.*", _DECODER), Keep("lm_head", _LOGITS)),
        not_layers=("shared", "*.embed_tokens", "*.relative_attention_bias"),
    ),
    Family(
        "clip",
        ("CLIPTextModel", "CLIPTextModelWithProjection"),
        keep=(
            Keep("text_projection", _POOLED),
            Keep("vision_model.*", _PICTURES),
            Keep("visual_projection", _PICTURES),
        ),
        not_layers=("*embeddings.token_embedding", "*embeddings.position_embedding"),
    ),
    Family(
        "language-model",
        (
            "LlamaModel", "LlamaForCausalLM", "MistralModel", "MistralForCausalLM",
            "Qwen2Model", "Qwen2ForCausalLM", "Qwen3Model", "Qwen3ForCausalLM",
            "GemmaModel", "GemmaForCausalLM", "Gemma2Model", "Gemma2ForCausalLM",
            "Gemma3TextModel", "Gemma3ForCausalLM", "SmolLM3Model", "SmolLM3ForCausalLM",
        ),
        keep=(Keep("lm_head", _LOGITS),),
        not_layers=("embed_tokens", "*.embed_tokens"),
    ),
    Family(
        "vision-language-model",
        (
            "Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration", "Mistral3ForConditionalGeneration",
            "Gemma3ForConditionalGeneration", "Gemma3Model", "LlavaForConditionalGeneration",
        ),
        keep=(
            Keep("lm_head", _LOGITS),
            Keep("*.lm_head", _LOGITS),
            Keep("visual.*", _PICTURES),
            Keep("*.visual.*", _PICTURES),
            Keep("*vision_tower.*", _PICTURES),
            Keep("*multi_modal_projector.*", _PICTURES),
        ),
        not_layers=("*.embed_tokens", "*embeddings.position_embedding", "visual.pos_embed",
                    "*.visual.pos_embed"),
    ),
    Family(
        "text-encoder",
        (),
        keep=(
            Keep("*lm_head", _LOGITS),
            Keep("*_projection", _POOLED),
            Keep("*vision*", _PICTURES),
            Keep("*visual*", _PICTURES),
        ),
        by_structure=True,
    ),
)  # fmt: skip


def find_encoder(class_name: str) -> Family:
    """Return the family of a text encoder's class; the last row's, if no row has it."""
    for family in TEXT_ENCODERS:
        if class_name in family.class_names:
            return family
    return TEXT_ENCODERS[-1]


def is_encoder(name: str, class_name: str) -> bool:
    """Tell whether a component of transformers is a text encoder.

    Args:
        name: of the component, as model_index.json has it.
        class_name: of the component.
    """
    named = name.startswith("text_encoder")
    return named or any(class_name in family.class_names for family in TEXT_ENCODERS)
