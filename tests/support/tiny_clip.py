"""A CLIP model with random weights, for tests."""

from pathlib import Path

import torch

from tests.support.pipelines import CHARACTERS


def tiny_clip(path: Path) -> Path:
    """Write a random CLIP model with its processor to ``path`` and return it."""
    import transformers

    tokens = [*CHARACTERS, *(f"{c}</w>" for c in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    size = len(tokens)
    text = {
        "vocab_size": size, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 16, "bos_token_id": size - 2,
        "eos_token_id": size - 1, "pad_token_id": size - 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(path)
    tokenizer = transformers.CLIPTokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=16
    )
    shape = {"height": 16, "width": 16}
    processor = transformers.CLIPImageProcessor(
        size=shape, crop_size=shape, do_center_crop=False, do_resize=True
    )
    transformers.CLIPProcessor(processor, tokenizer).save_pretrained(path)
    return path
