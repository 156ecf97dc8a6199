"""Text encoders whose normalised inputs have channels far larger than the rest, as trained ones do.

The function stays the same: a norm's weight grows, and the columns of the layers behind it shrink.
"""

import torch

from tests.support.encoders import make_encoder

#: of every 64 channels one is larger
SHARE = 64
#: class -> wider than the encoders of other tests, so that 1 in 64 channels is more than one
SIZES = {
    "T5EncoderModel": {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 6, "num_heads": 8},
    "LlamaForCausalLM": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
                         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "CLIPTextModel": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
                      "num_attention_heads": 8},
}  # fmt: skip

#: class -> norm and the layers that read it, inside of one block
_READERS = {
    "T5EncoderModel": {
        "layer.0.layer_norm": [f"layer.0.SelfAttention.{x}" for x in "qkv"],
        "layer.1.layer_norm": [f"layer.1.DenseReluDense.wi_{i}" for i in (0, 1)],
    },
    "LlamaForCausalLM": {
        "input_layernorm": [f"self_attn.{x}_proj" for x in "qkv"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    },
    "CLIPTextModel": {
        "layer_norm1": [f"self_attn.{x}_proj" for x in "qkv"],
        "layer_norm2": ["mlp.fc1"],
    },
}


def encoder_with_outliers(class_name, factor):
    """Return an encoder of SIZES with 1 channel in 64 of every block's inputs times ``factor``."""
    model = make_encoder(class_name, **SIZES[class_name])
    inner = getattr(model, "model", None) or model.encoder
    blocks = next(getattr(inner, name) for name in ("block", "layers") if hasattr(inner, name))
    with torch.no_grad():
        for block in blocks:
            for norm, readers in _READERS[class_name].items():
                _grow(block.get_submodule(norm), [block.get_submodule(x) for x in readers], factor)
    return model


def _grow(norm, readers, factor):
    count = len(norm.weight) // SHARE
    for parameter in norm.parameters():
        parameter[:count] *= factor
    for reader in readers:
        reader.weight[:, :count] /= factor
