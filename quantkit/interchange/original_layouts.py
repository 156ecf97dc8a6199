"""Layouts of denoisers in their authors' files: names and splits, one row per tensor or group.

ComfyUI, GGUF and single files have these layouts; diffusers splits some weights, swaps halves of
others and renames all of them. The rows say what diffusers' converters do
(``diffusers/loaders/single_file_utils.py``), which the tests compare them with.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """A weight and a bias, or one tensor, in both layouts.

    Names are module paths, which stand for the weight and the bias, or whole names of tensors.
    ``{i}`` and ``{x}`` are numbers, ``{rest}`` is any rest of a name; other braces hold numbers
    that ``layout_names`` computes from x and i.
    """

    original: str
    #: diffusers' names; several lie one after another along dim 0 of the original
    parts: tuple[str, ...]
    #: whether the halves of dim 0 change places: never, always, or in the last block
    swapped: Literal["never", "always", "last"] = "never"
    #: rows are columns in diffusers
    transposed: bool = False


@dataclass(frozen=True)
class Layout:
    """The original layout of a model class."""

    #: its name in GGUF files (general.architecture)
    architecture: str
    #: diffusers' class
    class_name: str
    #: the prefix in files that hold more than the denoiser, and in GGUF files of UNets
    prefix: str
    #: tensors that all such files hold
    markers: tuple[str, ...]
    rows: tuple[Row, ...]
    #: tensors that none of them holds
    foreign: tuple[str, ...] = ()
    #: tensors that published files hold and no program reads
    unused: tuple[str, ...] = ()


def one_row(original: str, diffusers: str) -> Row:
    """Return the row of a tensor that only has another name."""
    return Row(original, (diffusers,))


def _resnet(original: str, diffusers: str) -> tuple[Row, ...]:
    names = {
        "in_layers.0": "norm1",
        "in_layers.2": "conv1",
        "emb_layers.1": "time_emb_proj",
        "out_layers.0": "norm2",
        "out_layers.3": "conv2",
        "skip_connection": "conv_shortcut",
    }
    return tuple(one_row(f"{original}.{old}", f"{diffusers}.{new}") for old, new in names.items())


_UNET = (
    one_row("time_embed.0", "time_embedding.linear_1"),
    one_row("time_embed.2", "time_embedding.linear_2"),
    one_row("label_emb.0.0", "add_embedding.linear_1"),
    one_row("label_emb.0.2", "add_embedding.linear_2"),
    one_row("input_blocks.0.0", "conv_in"),
    *_resnet("input_blocks.{input}.0", "down_blocks.{x}.resnets.{i}"),
    one_row("input_blocks.{input}.1.{rest}", "down_blocks.{x}.attentions.{i}.{rest}"),
    one_row("input_blocks.{downsampler}.0.op", "down_blocks.{x}.downsamplers.0.conv"),
    *_resnet("middle_block.0", "mid_block.resnets.0"),
    one_row("middle_block.1.{rest}", "mid_block.attentions.0.{rest}"),
    *_resnet("middle_block.2", "mid_block.resnets.1"),
    *_resnet("output_blocks.{output}.0", "up_blocks.{x}.resnets.{i}"),
    one_row("output_blocks.{output}.1.{rest}", "up_blocks.{x}.attentions.{i}.{rest}"),
    one_row("output_blocks.{upsampler}.{after}.conv", "up_blocks.{x}.upsamplers.0.conv"),
    one_row("out.0", "conv_norm_out"),
    one_row("out.2", "conv_out"),
)


def _qkv(original: str, attention: str, names: tuple[str, ...] = ("to_q", "to_k", "to_v")) -> Row:
    return Row(original, tuple(f"{attention}.{name}" for name in names))


_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
_BLOCK = "transformer_blocks.{i}"
_SINGLE = "single_transformer_blocks.{i}"

_SD3 = (
    one_row("x_embedder.proj", "pos_embed.proj"),
    one_row("pos_embed", "pos_embed.pos_embed"),
    one_row("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    one_row("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    one_row("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    one_row("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
    one_row("context_embedder", "context_embedder"),
    _qkv("joint_blocks.{i}.x_block.attn.qkv", f"{_BLOCK}.attn"),
    one_row("joint_blocks.{i}.x_block.attn.ln_q", f"{_BLOCK}.attn.norm_q"),
    one_row("joint_blocks.{i}.x_block.attn.ln_k", f"{_BLOCK}.attn.norm_k"),
    one_row("joint_blocks.{i}.x_block.attn.proj", f"{_BLOCK}.attn.to_out.0"),
    _qkv("joint_blocks.{i}.x_block.attn2.qkv", f"{_BLOCK}.attn2"),
    one_row("joint_blocks.{i}.x_block.attn2.ln_q", f"{_BLOCK}.attn2.norm_q"),
    one_row("joint_blocks.{i}.x_block.attn2.ln_k", f"{_BLOCK}.attn2.norm_k"),
    one_row("joint_blocks.{i}.x_block.attn2.proj", f"{_BLOCK}.attn2.to_out.0"),
    one_row("joint_blocks.{i}.x_block.mlp.fc1", f"{_BLOCK}.ff.net.0.proj"),
    one_row("joint_blocks.{i}.x_block.mlp.fc2", f"{_BLOCK}.ff.net.2"),
    one_row("joint_blocks.{i}.x_block.adaLN_modulation.1", f"{_BLOCK}.norm1.linear"),
    _qkv("joint_blocks.{i}.context_block.attn.qkv", f"{_BLOCK}.attn", _ADDED),
    one_row("joint_blocks.{i}.context_block.attn.ln_q", f"{_BLOCK}.attn.norm_added_q"),
    one_row("joint_blocks.{i}.context_block.attn.ln_k", f"{_BLOCK}.attn.norm_added_k"),
    one_row("joint_blocks.{i}.context_block.attn.proj", f"{_BLOCK}.attn.to_add_out"),
    one_row("joint_blocks.{i}.context_block.mlp.fc1", f"{_BLOCK}.ff_context.net.0.proj"),
    one_row("joint_blocks.{i}.context_block.mlp.fc2", f"{_BLOCK}.ff_context.net.2"),
    # The last block only scales and shifts the prompt, in diffusers the other way round.
    Row(
        "joint_blocks.{i}.context_block.adaLN_modulation.1",
        (f"{_BLOCK}.norm1_context.linear",),
        swapped="last",
    ),
    one_row("final_layer.linear", "proj_out"),
    Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped="always"),
)

_DOUBLE = "double_blocks.{i}"
_STREAM = "single_blocks.{i}"

_FLUX_ATTENTION = (
    one_row("img_in", "x_embedder"),
    one_row("txt_in", "context_embedder"),
    _qkv(f"{_DOUBLE}.img_attn.qkv", f"{_BLOCK}.attn"),
    one_row(f"{_DOUBLE}.img_attn.norm.query_norm.scale", f"{_BLOCK}.attn.norm_q.weight"),
    one_row(f"{_DOUBLE}.img_attn.norm.key_norm.scale", f"{_BLOCK}.attn.norm_k.weight"),
    one_row(f"{_DOUBLE}.img_attn.proj", f"{_BLOCK}.attn.to_out.0"),
    _qkv(f"{_DOUBLE}.txt_attn.qkv", f"{_BLOCK}.attn", _ADDED),
    one_row(f"{_DOUBLE}.txt_attn.norm.query_norm.scale", f"{_BLOCK}.attn.norm_added_q.weight"),
    one_row(f"{_DOUBLE}.txt_attn.norm.key_norm.scale", f"{_BLOCK}.attn.norm_added_k.weight"),
    one_row(f"{_DOUBLE}.txt_attn.proj", f"{_BLOCK}.attn.to_add_out"),
    one_row(f"{_STREAM}.norm.query_norm.scale", f"{_SINGLE}.attn.norm_q.weight"),
    one_row(f"{_STREAM}.norm.key_norm.scale", f"{_SINGLE}.attn.norm_k.weight"),
    one_row("final_layer.linear", "proj_out"),
)

_FLUX_MLP = (
    one_row(f"{_DOUBLE}.img_mlp.0", f"{_BLOCK}.ff.net.0.proj"),
    one_row(f"{_DOUBLE}.img_mlp.2", f"{_BLOCK}.ff.net.2"),
    one_row(f"{_DOUBLE}.txt_mlp.0", f"{_BLOCK}.ff_context.net.0.proj"),
    one_row(f"{_DOUBLE}.txt_mlp.2", f"{_BLOCK}.ff_context.net.2"),
    _qkv(f"{_STREAM}.linear1", _SINGLE, ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
    one_row(f"{_STREAM}.linear2", f"{_SINGLE}.proj_out"),
)

_FLUX = (
    *_FLUX_ATTENTION,
    *_FLUX_MLP,
    one_row("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
    one_row("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
    one_row("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    one_row("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
    one_row("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
    one_row("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
    one_row(f"{_DOUBLE}.img_mod.lin", f"{_BLOCK}.norm1.linear"),
    one_row(f"{_DOUBLE}.txt_mod.lin", f"{_BLOCK}.norm1_context.linear"),
    one_row(f"{_STREAM}.modulation.lin", f"{_SINGLE}.norm.linear"),
    Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped="always"),
)

_GUIDANCE = "distilled_guidance_layer"

_CHROMA = (
    *_FLUX_ATTENTION,
    *_FLUX_MLP,
    one_row(f"{_GUIDANCE}.in_proj", f"{_GUIDANCE}.in_proj"),
    one_row(f"{_GUIDANCE}.layers.{{i}}.in_layer", f"{_GUIDANCE}.layers.{{i}}.linear_1"),
    one_row(f"{_GUIDANCE}.layers.{{i}}.out_layer", f"{_GUIDANCE}.layers.{{i}}.linear_2"),
    one_row(f"{_GUIDANCE}.norms.{{i}}.scale", f"{_GUIDANCE}.norms.{{i}}.weight"),
    one_row(f"{_GUIDANCE}.out_proj", f"{_GUIDANCE}.out_proj"),
)

_FLUX2 = (
    *_FLUX_ATTENTION,
    one_row(f"{_DOUBLE}.img_mlp.0", f"{_BLOCK}.ff.linear_in"),
    one_row(f"{_DOUBLE}.img_mlp.2", f"{_BLOCK}.ff.linear_out"),
    one_row(f"{_DOUBLE}.txt_mlp.0", f"{_BLOCK}.ff_context.linear_in"),
    one_row(f"{_DOUBLE}.txt_mlp.2", f"{_BLOCK}.ff_context.linear_out"),
    # Joined in diffusers, too.
    one_row(f"{_STREAM}.linear1", f"{_SINGLE}.attn.to_qkv_mlp_proj"),
    one_row(f"{_STREAM}.linear2", f"{_SINGLE}.attn.to_out"),
    one_row("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
    one_row("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
    one_row("guidance_in.in_layer", "time_guidance_embed.guidance_embedder.linear_1"),
    one_row("guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2"),
    one_row("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
    one_row("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
    one_row("single_stream_modulation.lin", "single_stream_modulation.linear"),
    Row("final_layer.adaLN_modulation.1", ("norm_out.linear",), swapped="always"),
)

_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q",
              "norm_k": "norm_k", "add_k_proj": "k_img", "add_v_proj": "v_img",
              "norm_added_k": "norm_k_img"}  # fmt: skip
_WAN = (
    one_row("patch_embedding", "patch_embedding"),
    one_row("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    one_row("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    one_row("time_projection.1", "condition_embedder.time_proj"),
    one_row("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    one_row("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    one_row("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    one_row("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    one_row("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    one_row("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
    *(
        one_row(f"blocks.{{i}}.{theirs}.{old}", f"blocks.{{i}}.{ours}.{new}")
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for new, old in _ATTENTION.items()
    ),
    one_row("blocks.{i}.norm3", "blocks.{i}.norm2"),
    one_row("blocks.{i}.ffn.0", "blocks.{i}.ffn.net.0.proj"),
    one_row("blocks.{i}.ffn.2", "blocks.{i}.ffn.net.2"),
    one_row("blocks.{i}.modulation", "blocks.{i}.scale_shift_table"),
    one_row("head.modulation", "scale_shift_table"),
    one_row("head.head", "proj_out"),
)

_SAME = one_row("{rest}", "{rest}")
_LTX = (
    one_row("patchify_proj", "proj_in"),
    one_row("adaln_single.{rest}", "time_embed.{rest}"),
    *(
        one_row(f"{_BLOCK}.attn{x}.{name}_norm", f"{_BLOCK}.attn{x}.norm_{name}")
        for x in (1, 2)
        for name in "qk"
    ),
    _SAME,
)

_STAGES = ("layers.{i}", "noise_refiner.{i}", "context_refiner.{i}")


def _stage_attention(stage: str, attention: str) -> tuple[Row, ...]:
    return (
        _qkv(f"{stage}.attention.qkv", f"{stage}.{attention}"),
        one_row(f"{stage}.attention.q_norm", f"{stage}.{attention}.norm_q"),
        one_row(f"{stage}.attention.k_norm", f"{stage}.{attention}.norm_k"),
        one_row(f"{stage}.attention.out", f"{stage}.{attention}.to_out.0"),
    )


_Z_IMAGE = (
    *(row for stage in _STAGES for row in _stage_attention(stage, "attention")),
    *(one_row(f"{stage}.{{rest}}", f"{stage}.{{rest}}") for stage in _STAGES),
    # diffusers tells embedders by their patches: 2 x 2 pixels of 1 frame are all that files have.
    one_row("x_embedder", "all_x_embedder.2-1"),
    one_row("final_layer.{rest}", "all_final_layer.2-1.{rest}"),
    one_row("t_embedder.{rest}", "t_embedder.{rest}"),
    one_row("cap_embedder.{rest}", "cap_embedder.{rest}"),
    one_row("x_pad_token", "x_pad_token"),
    one_row("cap_pad_token", "cap_pad_token"),
)

_LUMINA2_STAGE = {
    "feed_forward.w1": "feed_forward.linear_1",
    "feed_forward.w2": "feed_forward.linear_2",
    "feed_forward.w3": "feed_forward.linear_3",
    "adaLN_modulation.1": "norm1.linear",
    "attention_norm2": "norm2",
    "ffn_norm1": "ffn_norm1",
    "ffn_norm2": "ffn_norm2",
}
_CAPTION = "time_caption_embed.caption_embedder"

_LUMINA2 = (
    *(row for stage in _STAGES for row in _stage_attention(stage, "attn")),
    *(
        one_row(f"{stage}.{old}", f"{stage}.{new}")
        for stage in _STAGES
        for old, new in _LUMINA2_STAGE.items()
    ),
    one_row("layers.{i}.attention_norm1", "layers.{i}.norm1.norm"),
    one_row("noise_refiner.{i}.attention_norm1", "noise_refiner.{i}.norm1.norm"),
    # Which has no modulation.
    one_row("context_refiner.{i}.attention_norm1", "context_refiner.{i}.norm1"),
    one_row("x_embedder", "x_embedder"),
    one_row("t_embedder.mlp.0", "time_caption_embed.timestep_embedder.linear_1"),
    one_row("t_embedder.mlp.2", "time_caption_embed.timestep_embedder.linear_2"),
    one_row("cap_embedder.{rest}", f"{_CAPTION}.{{rest}}"),
    one_row("final_layer.adaLN_modulation.1", "norm_out.linear_1"),
    one_row("final_layer.linear", "norm_out.linear_2"),
)

_AURA_JOINT = {
    "attn.w2q": "attn.to_q", "attn.w2k": "attn.to_k", "attn.w2v": "attn.to_v",
    "attn.w2o": "attn.to_out.0", "attn.w1q": "attn.add_q_proj", "attn.w1k": "attn.add_k_proj",
    "attn.w1v": "attn.add_v_proj", "attn.w1o": "attn.to_add_out", "modX.1": "norm1.linear",
    "modC.1": "norm1_context.linear",
}  # fmt: skip
_AURA_SINGLE = {
    "attn.w1q": "attn.to_q", "attn.w1k": "attn.to_k", "attn.w1v": "attn.to_v",
    "attn.w1o": "attn.to_out.0", "modCX.1": "norm1.linear",
}  # fmt: skip


def _aura_mlp(original: str, diffusers: str) -> tuple[Row, ...]:
    names = {"c_fc1": "linear_1", "c_fc2": "linear_2", "c_proj": "out_projection"}
    return tuple(one_row(f"{original}.{old}", f"{diffusers}.{new}") for old, new in names.items())


_AURA = (
    one_row("init_x_linear", "pos_embed.proj"),
    one_row("positional_encoding", "pos_embed.pos_embed"),
    one_row("register_tokens", "register_tokens"),
    one_row("cond_seq_linear", "context_embedder"),
    one_row("t_embedder.mlp.0", "time_step_proj.linear_1"),
    one_row("t_embedder.mlp.2", "time_step_proj.linear_2"),
    *(
        one_row(f"double_layers.{{i}}.{old}", f"joint_{_BLOCK}.{new}")
        for old, new in _AURA_JOINT.items()
    ),
    *_aura_mlp("double_layers.{i}.mlpX", f"joint_{_BLOCK}.ff"),
    *_aura_mlp("double_layers.{i}.mlpC", f"joint_{_BLOCK}.ff_context"),
    *(
        one_row(f"single_layers.{{i}}.{old}", f"{_SINGLE}.{new}")
        for old, new in _AURA_SINGLE.items()
    ),
    *_aura_mlp("single_layers.{i}.mlp", f"{_SINGLE}.ff"),
    one_row("final_linear", "proj_out"),
    Row("modF.1", ("norm_out.linear",), swapped="always"),
)

_IN_PIPELINE = "model.diffusion_model."
_LABEL = "label_emb.0.0.weight"
_FLUX_NORM = "double_blocks.0.img_attn.norm.key_norm.scale"

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "sdxl",
        "UNet2DConditionModel",
        _IN_PIPELINE,
        markers=("input_blocks.0.0.weight", _LABEL),
        rows=_UNET,
    ),
    # Stable Diffusion 1.x and 2.x, which GGUF files do not distinguish.
    Layout(
        "sd1",
        "UNet2DConditionModel",
        _IN_PIPELINE,
        markers=("input_blocks.0.0.weight",),
        rows=_UNET,
        foreign=(_LABEL,),
    ),
    Layout(
        "sd3",
        "SD3Transformer2DModel",
        "",
        markers=("joint_blocks.0.x_block.attn.qkv.weight",),
        rows=_SD3,
    ),
    Layout(
        "flux",
        "FluxTransformer2DModel",
        "",
        markers=(_FLUX_NORM, "double_blocks.0.img_mod.lin.weight"),
        rows=_FLUX,
    ),
    Layout(
        "flux",
        "ChromaTransformer2DModel",
        "",
        markers=(_FLUX_NORM, "distilled_guidance_layer.in_proj.weight"),
        rows=_CHROMA,
    ),
    Layout(
        "flux",
        "Flux2Transformer2DModel",
        "",
        markers=(_FLUX_NORM, "double_stream_modulation_img.lin.weight"),
        rows=_FLUX2,
    ),
    Layout(
        "wan",
        "WanTransformer3DModel",
        "",
        markers=("head.modulation", "blocks.0.self_attn.q.weight"),
        rows=_WAN,
    ),
    Layout(
        "qwen_image",
        "QwenImageTransformer2DModel",
        "",
        markers=("txt_norm.weight", "transformer_blocks.0.attn.add_q_proj.weight"),
        rows=(_SAME,),
    ),
    Layout(
        "ltxv",
        "LTXVideoTransformer3DModel",
        "",
        markers=("patchify_proj.weight", "transformer_blocks.0.attn1.q_norm.weight"),
        rows=_LTX,
    ),
    # ComfyUI tells Lumina 2 and Z-Image apart by their widths.
    Layout(
        "lumina2",
        "Lumina2Transformer2DModel",
        "",
        markers=("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight"),
        rows=_LUMINA2,
        unused=("norm_final.weight",),
    ),
    Layout(
        "lumina2",
        "ZImageTransformer2DModel",
        "",
        markers=("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.0.weight"),
        rows=_Z_IMAGE,
        unused=("norm_final.weight",),
    ),
    Layout(
        "aura",
        "AuraFlowTransformer2DModel",
        "",
        markers=("double_layers.0.attn.w1q.weight", "cond_seq_linear.weight"),
        rows=_AURA,
    ),
)
