"""Tiny random denoisers of every original layout, and what diffusers reads of them."""

import inspect
import re
from dataclasses import replace

import torch
from diffusers.loaders import single_file_model, single_file_utils

from quantkit.interchange.joining import join
from quantkit.interchange.layout_names import layout_of_model, original_tensors
from tests.support.denoiser_classes import ROWS
from tests.support.pipelines import _sd3_transformer, flux_transformer, narrow_unet
from tests.support.tiny_denoisers import tiny_model


def tiny_sd15(**changed):
    return narrow_unet(
        "sd15",
        **changed,
        down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
        up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
        cross_attention_dim=32,
        attention_head_dim=2,
        layers_per_block=2,
    )


def tiny_sd2():
    return narrow_unet(
        "sd15",
        down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
        up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
        cross_attention_dim=64,
        attention_head_dim=[1, 2],
        use_linear_projection=True,
    )


def tiny_sdxl():
    return narrow_unet(
        "sdxl",
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"],
        transformer_layers_per_block=[1, 2],
        attention_head_dim=[1, 2],
        cross_attention_dim=64,
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=6 * 32 + 32,
    )


def tiny_sd35():
    import diffusers

    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )


#: name -> (the model, GGUF's architecture)
DENOISERS = {
    "sd15": (tiny_sd15, "sd1"),
    "sd2": (tiny_sd2, "sd1"),
    "sdxl": (tiny_sdxl, "sdxl"),
    "sd3": (_sd3_transformer, "sd3"),
    "sd35": (tiny_sd35, "sd3"),
    "flux": (flux_transformer, "flux"),
}
#: Those that are tiny rows of denoiser_classes: class -> (GGUF's architecture, changes of the row).
RENAMED = {
    "WanTransformer3DModel": ("wan", {}),
    "QwenImageTransformer2DModel": ("qwen_image", {}),
    "LTXVideoTransformer3DModel": ("ltxv", {}),
    "AuraFlowTransformer2DModel": ("aura", {"num_mmdit_layers": 2, "num_single_dit_layers": 2}),
    "ChromaTransformer2DModel": (
        "flux",
        {"num_layers": 2, "num_single_layers": 2, "approximator_layers": 2},
    ),
    "Flux2Transformer2DModel": ("flux", {"num_layers": 2, "num_single_layers": 2}),
    "HunyuanVideoTransformer3DModel": (
        "hyvid",
        {"num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 2},
    ),
    "Lumina2Transformer2DModel": ("lumina2", {"num_layers": 2, "num_refiner_layers": 2}),
    "PixArtTransformer2DModel": (
        "pixart",
        {
            "num_layers": 2,
            "num_attention_heads": 3,
            "cross_attention_dim": 48,
            "use_additional_conditions": True,
        },
    ),
    "ZImageTransformer2DModel": ("lumina2", {"n_layers": 2}),
}


def tiny_denoiser(name, seed=0):
    """A denoiser whose tensors are all random, those too that are made as zeros or ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DENOISERS[name][0]().eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def tiny_renamed(name):
    """A tiny model of a class of RENAMED."""
    row = next(row for row in ROWS if row.class_name == name)
    return tiny_model(replace(row, config={**row.config, **RENAMED[name][1]}))


def original_state(model):
    """The tensors of a model in the original layout, without a prefix."""
    tensors = model.state_dict()
    layout = layout_of_model(type(model).__name__, tensors)
    return {
        original.name: join(original, [tensors[name] for name in original.parts])
        for original in original_tensors(layout, tensors)
    }


#: PixArt's module paths and names, which no class of diffusers reads: original -> diffusers, in
#: the order of joined rows. Source: scripts/convert_pixart_{alpha,sigma}_to_diffusers.py of
#: diffusers at 58eb52c0.
PIXART_NAMES = {
    "x_embedder.proj": "pos_embed.proj",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "t_embedder.mlp.0": "adaln_single.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "adaln_single.emb.timestep_embedder.linear_2",
    "csize_embedder.mlp.0": "adaln_single.emb.resolution_embedder.linear_1",
    "csize_embedder.mlp.2": "adaln_single.emb.resolution_embedder.linear_2",
    "ar_embedder.mlp.0": "adaln_single.emb.aspect_ratio_embedder.linear_1",
    "ar_embedder.mlp.2": "adaln_single.emb.aspect_ratio_embedder.linear_2",
    "t_block.1": "adaln_single.linear",
    "blocks.N.attn.qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "blocks.N.attn.proj": "attn1.to_out.0",
    "blocks.N.mlp.fc1": "ff.net.0.proj",
    "blocks.N.mlp.fc2": "ff.net.2",
    "blocks.N.cross_attn.q_linear": "attn2.to_q",
    "blocks.N.cross_attn.kv_linear": "attn2.to_k attn2.to_v",
    "blocks.N.cross_attn.proj": "attn2.to_out.0",
    "final_layer.linear": "proj_out",
    "final_layer": "",
    "blocks.N": "",
}


def pixart_of_original(state):
    """The tensors of PixArt in diffusers' names, as its conversion scripts split them."""
    found = {}
    for name, tensor in state.items():
        if name in {"y_embedder.y_embedding", "pos_embed"}:
            continue
        path, _, end = name.rpartition(".")
        block = re.match(r"blocks\.(\d+)", path)
        row = PIXART_NAMES[path.replace(block[0], "blocks.N", 1) if block else path]
        inside = f"transformer_blocks.{block[1]}." if block else ""
        names = [f"{inside}{part}{'.' * bool(part)}{end}" for part in row.split(" ")]
        found |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    return found


#: The sizes of published models in diffusers' converters, and those of tiny ones.
_TYPED_IN = {
    "FluxTransformer2DModel": {"inner_dim = 3072": "inner_dim = 64"},
    "HunyuanVideoTransformer3DModel": {"hidden_size = 3072": "hidden_size = 32"},
    "Lumina2Transformer2DModel": {
        "q_dim = 2304": "q_dim = 48",
        "k_dim = v_dim = 768": "k_dim = v_dim = 16",
    },
    "ChromaTransformer2DModel": {"inner_dim = 3072": "inner_dim = 32"},
}


def let_diffusers_read_narrow(patch, class_name):
    """Put the width of a tiny model into diffusers' converter, where that has another typed in."""
    if class_name not in _TYPED_IN:
        return
    row = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[class_name]
    name = row["checkpoint_mapping_fn"].__name__
    code = inspect.getsource(getattr(single_file_utils, name))
    for theirs, ours in _TYPED_IN[class_name].items():
        assert code.count(theirs) == 1
        code = code.replace(theirs, ours)
    space = vars(single_file_utils).copy()
    exec(code, space)
    patch.setitem(row, "checkpoint_mapping_fn", space[name])


def _unet_inputs(context):
    return {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(401.0),
        "encoder_hidden_states": torch.randn(1, 7, context),
    }


def _sdxl_inputs():
    sizes = torch.tensor([[64.0, 64, 0, 0, 64, 64]])
    added = {"text_embeds": torch.randn(1, 32), "time_ids": sizes}
    return {**_unet_inputs(64), "added_cond_kwargs": added}


def _sd3_inputs():
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 7, 64),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([401.0]),
    }


def _flux_inputs():
    return {
        "hidden_states": torch.randn(1, 9, 16),
        "encoder_hidden_states": torch.randn(1, 7, 64),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.4]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(9, 3),
        "txt_ids": torch.zeros(7, 3),
    }


INPUTS = {
    "sd15": lambda: _unet_inputs(32),
    "sdxl": _sdxl_inputs,
    "sd3": _sd3_inputs,
    "flux": _flux_inputs,
}


def output_of(name, model):
    """What a denoiser makes of inputs that are always the same."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(7)
        return model(**INPUTS[name]()).sample.float()
