"""Configs of denoisers that follow from their tensors: of single files in layouts of their authors.

Sizes are those of the tensors; what no tensor shows is as the authors publish it. Whether all names
and shapes are those of the config is checked afterwards, as of any config.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from quantkit.interchange.layout_names import layout_of_names
from quantkit.interchange.original_layouts import Layout

_TIME = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "use_linear_projection": True, "sample_size": 128,
}  # fmt: skip
_DOWN, _CROSS_DOWN, _UP, _CROSS_UP = (
    "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D",
)  # fmt: skip
#: (layout, columns of a prompt) -> the config of a published UNet, as far as it is not the class's
UNETS: dict[tuple[str, int], dict[str, Any]] = {
    ("sd1", 768): {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    # 2.1 upcasts attention, which 2.0 can do without.
    ("sd1", 1024): {
        "sample_size": 64,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    ("sdxl", 2048): {
        **_TIME,
        "block_out_channels": [320, 640, 1280],
        "down_block_types": [_DOWN, _CROSS_DOWN, _CROSS_DOWN],
        "up_block_types": [_CROSS_UP, _CROSS_UP, _UP],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "projection_class_embeddings_input_dim": 2816,
    },
    # The refiner.
    ("sdxl", 1280): {
        **_TIME,
        "block_out_channels": [384, 768, 1536, 1536],
        "down_block_types": [_DOWN, _CROSS_DOWN, _CROSS_DOWN, _DOWN],
        "up_block_types": [_UP, _CROSS_UP, _CROSS_UP, _UP],
        "transformer_layers_per_block": 4,
        "attention_head_dim": [6, 12, 24, 24],
        "cross_attention_dim": 1280,
        "projection_class_embeddings_input_dim": 2560,
    },
}


@dataclass(frozen=True)
class _Tensors:
    """Shapes of a file's tensors, by their names behind the prefix."""

    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]

    def has(self, name: str) -> bool:
        return name in self.shapes

    def rows(self, name: str) -> int:
        return self.shapes[name][0]

    def columns(self, name: str) -> int:
        return self.shapes[name][1]

    def count(self, blocks: str) -> int:
        """Return the number of blocks that are called ``blocks.0`` and so on."""
        begin = f"{blocks}."
        return len({n[len(begin) :].partition(".")[0] for n in self.shapes if n.startswith(begin)})


def _unet(t: _Tensors) -> dict[str, Any]:
    prompt = next(name for name in t.shapes if name.endswith(".attn2.to_k.weight"))
    channels = t.columns("input_blocks.0.0.weight")
    return {**UNETS[t.layout.architecture, t.columns(prompt)], "in_channels": channels}


def _sd3(t: _Tensors) -> dict[str, Any]:
    def has(name: str) -> list[int]:
        return [i for i in range(layers) if t.has(f"joint_blocks.{i}.x_block.{name}.weight")]

    layers, width = t.count("joint_blocks"), t.columns("joint_blocks.0.x_block.attn.qkv.weight")
    normed = {"qk_norm": "rms_norm"} if has("attn.ln_q") else {}
    dual = {"dual_attention_layers": found} if (found := has("attn2.qkv")) else {}
    return {
        "sample_size": 128,
        "num_layers": layers,
        "attention_head_dim": 64,
        "num_attention_heads": width // 64,
        "caption_projection_dim": t.rows("context_embedder.weight"),
        "pos_embed_max_size": isqrt(t.columns("pos_embed")),
        **normed,
        **dual,
    }


def _flux(t: _Tensors) -> dict[str, Any]:
    channels, out = t.columns("img_in.weight"), t.rows("final_layer.linear.weight")
    return {
        **_streams(t),
        "in_channels": channels,
        "guidance_embeds": t.has("guidance_in.in_layer.weight"),
        **({"out_channels": out} if out != channels else {}),
    }


def _flux2(t: _Tensors) -> dict[str, Any]:
    return {
        **_streams(t),
        "num_attention_heads": t.rows("img_in.weight") // 128,
        "joint_attention_dim": t.columns("txt_in.weight"),
        "guidance_embeds": t.has("guidance_in.in_layer.weight"),
    }


def _streams(t: _Tensors) -> dict[str, Any]:
    return {
        "num_layers": t.count("double_blocks"),
        "num_single_layers": t.count("single_blocks"),
    }


def _hunyuan_video(t: _Tensors) -> dict[str, Any]:
    guided = t.has("guidance_in.mlp.0.weight") or t.has("guidance_in.in_layer.weight")
    return {**_streams(t), "guidance_embeds": guided}


def _wan(t: _Tensors) -> dict[str, Any]:
    width = t.rows("patch_embedding.weight")
    image = "img_emb.proj.1.weight"
    shown = {"image_dim": t.columns(image), "added_kv_proj_dim": width} if t.has(image) else {}
    return {
        "num_layers": t.count("blocks"),
        "num_attention_heads": width // 128,
        "ffn_dim": t.rows("blocks.0.ffn.0.weight"),
        "in_channels": t.columns("patch_embedding.weight"),
        "out_channels": t.rows("head.head.weight") // 4,
        **shown,
    }


def _pixart(t: _Tensors) -> dict[str, Any]:
    # As many positions as patches of 2 x 2; from them follows the side of the pictures.
    size = 2 * isqrt(t.columns("pos_embed"))
    return {
        "sample_size": size,
        "interpolation_scale": max(size // 64, 1),
        "caption_channels": t.columns("y_embedder.y_proj.fc1.weight"),
        "use_additional_conditions": t.has("csize_embedder.mlp.0.weight"),
    }


def _lumina2(t: _Tensors) -> dict[str, Any]:
    return {"num_layers": t.count("layers"), "cap_feat_dim": t.rows("cap_embedder.0.weight")}


def _aura(t: _Tensors) -> dict[str, Any]:
    return {
        "num_mmdit_layers": t.count("double_layers"),
        "num_single_dit_layers": t.count("single_layers"),
        "pos_embed_max_size": t.columns("positional_encoding"),
    }


#: class -> its config, as far as it is not the class's own
DERIVED: dict[str, Callable[[_Tensors], dict[str, Any]]] = {
    "UNet2DConditionModel": _unet,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "ChromaTransformer2DModel": _streams,
    "QwenImageTransformer2DModel": lambda t: {"num_layers": t.count("transformer_blocks")},
    "ZImageTransformer2DModel": lambda t: {"n_layers": t.count("layers")},
    "LTXVideoTransformer3DModel": lambda t: {"num_layers": t.count("transformer_blocks")},
    "Lumina2Transformer2DModel": _lumina2,
    "AuraFlowTransformer2DModel": _aura,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "WanTransformer3DModel": _wan,
    "PixArtTransformer2DModel": _pixart,
}


def derived_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Return the config.json of a file's denoiser; None where its tensors do not say it.

    Args:
        shapes: of all tensors of the file.
    """
    found = layout_of_names(shapes)
    if found is None:
        return None
    layout, prefix = found
    own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    try:
        config = DERIVED[layout.class_name](_Tensors(layout, own))
    except (KeyError, IndexError, StopIteration):
        return None
    return {"_class_name": layout.class_name, **config}


def config_text(config: Mapping[str, Any]) -> str:
    """Return the text of a config.json, the same for the same config."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
