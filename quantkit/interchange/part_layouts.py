"""Layouts of VAE and text encoders in whole checkpoints: prefixes and names.

The rows say what diffusers' converters do (``diffusers/loaders/single_file_utils.py``), which the
tests compare them with.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from quantkit.interchange.layout_rows import Row, one_row
from quantkit.interchange.original_layouts import Layout

_LAYER = "text_model.encoder.layers.{i}"
_BLOCK = "transformer.resblocks.{i}"
_PROJECTIONS = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")


def _vae_resnet(original: str, diffusers: str) -> tuple[Row, ...]:
    shortcut = one_row(f"{original}.nin_shortcut", f"{diffusers}.conv_shortcut")
    return (shortcut, one_row(f"{original}.{{rest}}", f"{diffusers}.{{rest}}"))


def _vae_middle(half: str) -> tuple[Row, ...]:
    names = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
    attention = (f"{half}.mid.attn_1", f"{half}.mid_block.attentions.0")
    return (
        *_vae_resnet(f"{half}.mid.block_1", f"{half}.mid_block.resnets.0"),
        *_vae_resnet(f"{half}.mid.block_2", f"{half}.mid_block.resnets.1"),
        *(one_row(f"{attention[0]}.{old}", f"{attention[1]}.{new}") for old, new in names.items()),
        one_row(f"{half}.norm_out", f"{half}.conv_norm_out"),
        one_row(f"{half}.conv_in", f"{half}.conv_in"),
        one_row(f"{half}.conv_out", f"{half}.conv_out"),
    )


#: The VAE of latent diffusion, of Stable Diffusion and FLUX. Its decoder's blocks are numbered from
#: the last one.
VAE = Layout(
    "the VAE of latent diffusion",
    "AutoencoderKL",
    "",
    markers=("decoder.mid.attn_1.q.weight",),
    rows=(
        *_vae_resnet("encoder.down.{x}.block.{i}", "encoder.down_blocks.{x}.resnets.{i}"),
        one_row("encoder.down.{x}.downsample.conv", "encoder.down_blocks.{x}.downsamplers.0.conv"),
        *_vae_middle("encoder"),
        *_vae_resnet("decoder.up.{up}.block.{i}", "decoder.up_blocks.{x}.resnets.{i}"),
        one_row("decoder.up.{up}.upsample.conv", "decoder.up_blocks.{x}.upsamplers.0.conv"),
        *_vae_middle("decoder"),
        one_row("quant_conv", "quant_conv"),
        one_row("post_quant_conv", "post_quant_conv"),
    ),
)

#: CLIP in OpenCLIP's names: Q, K and V joined, the projection transposed.
OPEN_CLIP = Layout(
    "OpenCLIP",
    "CLIPTextModelWithProjection",
    "",
    markers=("transformer.resblocks.0.attn.in_proj_weight",),
    rows=(
        one_row("positional_embedding", "text_model.embeddings.position_embedding.weight"),
        one_row("token_embedding", "text_model.embeddings.token_embedding"),
        Row(f"{_BLOCK}.attn.in_proj_weight", tuple(f"{name}.weight" for name in _PROJECTIONS)),
        Row(f"{_BLOCK}.attn.in_proj_bias", tuple(f"{name}.bias" for name in _PROJECTIONS)),
        one_row(f"{_BLOCK}.attn.out_proj", f"{_LAYER}.self_attn.out_proj"),
        one_row(f"{_BLOCK}.ln_1", f"{_LAYER}.layer_norm1"),
        one_row(f"{_BLOCK}.ln_2", f"{_LAYER}.layer_norm2"),
        one_row(f"{_BLOCK}.mlp.c_fc", f"{_LAYER}.mlp.fc1"),
        one_row(f"{_BLOCK}.mlp.c_proj", f"{_LAYER}.mlp.fc2"),
        one_row("ln_final", "text_model.final_layer_norm"),
        Row("text_projection", ("text_projection.weight",), transposed=True),
    ),
)


@dataclass(frozen=True)
class PartLayout:
    """The prefix and layout of a VAE or text encoder in whole checkpoints."""

    #: the prefix of its names
    prefix: str
    #: its component names in pipelines
    components: tuple[str, ...]
    #: other names than the library's, where a file has them
    layout: Layout | None = None
    #: of the component, where several may be called so; "": any
    class_name: str = ""
    #: square weights that are the identity, whatever the file says
    identities: tuple[str, ...] = ()
    #: a pattern of other tensors in the file; {layers} is the number of the model's layers
    unused: str = ""


PART_LAYOUTS: tuple[PartLayout, ...] = (
    # What trained it judged pictures.
    PartLayout("first_stage_model.", ("vae",), VAE, unused=r"(loss|model_ema)\..*"),
    PartLayout("vae.", ("vae",), VAE, unused=r"(loss|model_ema)\..*"),
    PartLayout("cond_stage_model.transformer.", ("text_encoder",)),
    # Stable Diffusion 2 takes the last layer but one, so that diffusers' config ends with it.
    PartLayout(
        "cond_stage_model.model.",
        ("text_encoder",),
        OPEN_CLIP,
        unused=r"transformer\.resblocks\.{layers}\..*",
    ),
    PartLayout("conditioner.embedders.0.transformer.", ("text_encoder",)),
    PartLayout("conditioner.embedders.1.model.", ("text_encoder_2",), OPEN_CLIP),
    # SDXL's refiner has that one alone.
    PartLayout("conditioner.embedders.0.model.", ("text_encoder_2",), OPEN_CLIP),
    # Stable Diffusion 3 takes its pooled output as it is; diffusers has a projection there.
    PartLayout(
        "text_encoders.clip_l.transformer.",
        ("text_encoder",),
        identities=("text_projection.weight",),
    ),
    PartLayout("text_encoders.clip_g.transformer.", ("text_encoder_2",)),
    PartLayout(
        "text_encoders.t5xxl.transformer.",
        ("text_encoder_2", "text_encoder_3"),
        class_name="T5EncoderModel",
    ),
)

#: Tensors that no pipeline reads: copies, schedules, counters, what only training or pictures need.
_IGNORED = re.compile(
    r"model_ema\..*|loss\..*"
    r"|betas|(sqrt_)?(alphas_cumprod|one_minus_alphas_cumprod)(_prev)?"
    r"|(log_one_minus|sqrt_recip|sqrt_recipm1)_alphas_cumprod"
    r"|posterior_(variance|log_variance_clipped|mean_coef[12])|lvlb_weights|logvar|denoiser\.sigmas"
    r"|(.+\.)?(position_ids|logit_scale|attn_mask)"
    # Of CLIP: only a class with a projection reads it, and then it is the model's.
    r"|(cond_stage_model|conditioner|text_encoders)\.(.+\.)?text_projection(\.weight)?"
)


def is_ignored(name: str) -> bool:
    """Tell that no pipeline reads a tensor of a checkpoint, when no model has it."""
    return _IGNORED.fullmatch(name) is not None


def unused_pattern(place: PartLayout, tensors: Collection[str]) -> re.Pattern[str]:
    """Return the pattern of tensors that such checkpoints have and the model does not.

    Args:
        place: of the part.
        tensors: of the model.

    Returns:
        for names without the prefix.
    """
    layers = {found[1] for t in tensors if (found := re.search(r"\.layers\.(\d+)\.", t))}
    return re.compile(place.unused.replace("{layers}", str(len(layers))))
