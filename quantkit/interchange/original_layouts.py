"""Layouts of denoisers in their authors' files: names and splits, one row per tensor or group.

ComfyUI, GGUF and single files have these layouts; diffusers splits some weights, swaps halves of
others and renames all of them. The rows say what diffusers' converters do, which the tests compare
them with: ``diffusers/loaders/single_file_utils.py``, and ``scripts/convert_pixart_*`` of PixArt.
"""

from dataclasses import dataclass

from quantkit.interchange.flux_rows import CHROMA, FLUX, FLUX2, HUNYUAN_VIDEO
from quantkit.interchange.layout_rows import Row
from quantkit.interchange.transformer_rows import (
    AURA,
    LTX,
    LUMINA2,
    PIXART,
    SAME,
    SD3,
    WAN,
    Z_IMAGE,
)
from quantkit.interchange.unet_rows import UNET


@dataclass(frozen=True)
class Layout:
    """The original layout of a model class."""

    #: its name in GGUF files (general.architecture), where programs read such
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
    #: whether programs read GGUF files of it
    gguf: bool = True


_IN_PIPELINE = "model.diffusion_model."
_LABEL = "label_emb.0.0.weight"
_FLUX_NORM = "double_blocks.0.img_attn.norm.key_norm.scale"

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "sdxl",
        "UNet2DConditionModel",
        _IN_PIPELINE,
        markers=("input_blocks.0.0.weight", _LABEL),
        rows=UNET,
    ),
    # Stable Diffusion 1.x and 2.x, which GGUF files do not distinguish.
    Layout(
        "sd1",
        "UNet2DConditionModel",
        _IN_PIPELINE,
        markers=("input_blocks.0.0.weight",),
        rows=UNET,
        foreign=(_LABEL,),
    ),
    Layout(
        "sd3",
        "SD3Transformer2DModel",
        "",
        markers=("joint_blocks.0.x_block.attn.qkv.weight",),
        rows=SD3,
    ),
    Layout(
        "flux",
        "FluxTransformer2DModel",
        "",
        markers=(_FLUX_NORM, "double_blocks.0.img_mod.lin.weight"),
        rows=FLUX,
    ),
    Layout(
        "flux",
        "ChromaTransformer2DModel",
        "",
        markers=(_FLUX_NORM, "distilled_guidance_layer.in_proj.weight"),
        rows=CHROMA,
    ),
    Layout(
        "flux",
        "Flux2Transformer2DModel",
        "",
        markers=(_FLUX_NORM, "double_stream_modulation_img.lin.weight"),
        rows=FLUX2,
    ),
    Layout(
        "wan",
        "WanTransformer3DModel",
        "",
        markers=("head.modulation", "blocks.0.self_attn.q.weight"),
        rows=WAN,
    ),
    Layout(
        "qwen_image",
        "QwenImageTransformer2DModel",
        "",
        markers=("txt_norm.weight", "transformer_blocks.0.attn.add_q_proj.weight"),
        rows=(SAME,),
    ),
    Layout(
        "ltxv",
        "LTXVideoTransformer3DModel",
        "",
        markers=("patchify_proj.weight", "transformer_blocks.0.attn1.q_norm.weight"),
        rows=LTX,
    ),
    # ComfyUI tells Lumina 2 and Z-Image apart by their widths.
    Layout(
        "lumina2",
        "Lumina2Transformer2DModel",
        "",
        markers=("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight"),
        rows=LUMINA2,
        unused=("norm_final.weight",),
    ),
    Layout(
        "lumina2",
        "ZImageTransformer2DModel",
        "",
        markers=("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.0.weight"),
        rows=Z_IMAGE,
        unused=("norm_final.weight",),
    ),
    Layout(
        "aura",
        "AuraFlowTransformer2DModel",
        "",
        markers=("double_layers.0.attn.w1q.weight", "cond_seq_linear.weight"),
        rows=AURA,
    ),
    Layout(
        "hyvid",
        "HunyuanVideoTransformer3DModel",
        "",
        markers=("double_blocks.0.img_attn_qkv.weight", "txt_in.input_embedder.weight"),
        rows=HUNYUAN_VIDEO,
    ),
    Layout(
        "pixart",
        "PixArtTransformer2DModel",
        "",
        markers=("t_block.1.weight", "blocks.0.cross_attn.kv_linear.weight"),
        rows=PIXART,
        # The prompt that is none, and positions, which programs compute.
        unused=("y_embedder.y_embedding", "pos_embed"),
        gguf=False,
    ),
)
