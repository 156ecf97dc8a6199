"""One literal row per tuned family of denoisers, and one for all others.

The rows follow the module structure in diffusers; ``tests/golden/keys_*.json.gz`` hold the modules
of published models, and every row is tested against them. What no row is for is ``GENERAL``: names
and shapes tell there what a layer does, and tiny models of most classes are packed by the tests.
"""

from fnmatch import fnmatchcase

from quantkit.errors import ModelError
from quantkit.models.family import (
    CONDITION,
    FEW,
    FIRST,
    LAST,
    MODULATION,
    TEXT,
    UNKNOWN,
    Family,
    Keep,
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "unet",
        ("UNet2DConditionModel",),
        keep=(
            Keep("conv_in", FIRST),
            Keep("conv_out", LAST),
            Keep("time_embedding.*", CONDITION),
            Keep("add_embedding.*", CONDITION),
            Keep("class_embedding", CONDITION),
            Keep("class_embedding.*", CONDITION),
            Keep("encoder_hid_proj", TEXT),
            Keep("encoder_hid_proj.*", TEXT),
            Keep("*.time_emb_proj", MODULATION),
        ),
        # With num_class_embeds set, class_embedding is an nn.Embedding; kept either way.
        not_layers=("class_embedding",),
    ),
    Family(
        "sd3",
        ("SD3Transformer2DModel",),
        keep=(
            Keep("pos_embed.proj", FIRST),
            Keep("time_text_embed.*", CONDITION),
            Keep("context_embedder", TEXT),
            Keep("*.norm1.linear", MODULATION),
            Keep("*.norm1_context.linear", MODULATION),
            Keep("norm_out.linear", MODULATION),
            Keep("proj_out", LAST),
        ),
    ),
    Family(
        "flux",
        ("FluxTransformer2DModel",),
        keep=(
            Keep("x_embedder", FIRST),
            Keep("time_text_embed.*", CONDITION),
            Keep("context_embedder", TEXT),
            Keep("*.norm1.linear", MODULATION),
            Keep("*.norm1_context.linear", MODULATION),
            Keep("single_transformer_blocks.*.norm.linear", MODULATION),
            Keep("norm_out.linear", MODULATION),
            Keep("proj_out", LAST),
        ),
    ),
    Family(
        "pixart",
        ("PixArtTransformer2DModel",),
        keep=(
            Keep("pos_embed.proj", FIRST),
            Keep("adaln_single.*", MODULATION),
            Keep("caption_projection.*", TEXT),
            Keep("proj_out", LAST),
        ),
    ),
    Family(
        "sana",
        ("SanaTransformer2DModel",),
        keep=(
            Keep("patch_embed.proj", FIRST),
            Keep("time_embed.*", MODULATION),
            Keep("caption_projection.*", TEXT),
            Keep("proj_out", LAST),
        ),
        # Depthwise: K is 9, and one channel is no matrix product.
        not_layers=("*.ff.conv_depth",),
    ),
    Family(
        "flux2",
        ("Flux2Transformer2DModel",),
        keep=(
            Keep("x_embedder", FIRST),
            Keep("time_guidance_embed.*", CONDITION),
            Keep("context_embedder", TEXT),
            Keep("double_stream_modulation_*.linear", MODULATION),
            Keep("single_stream_modulation.linear", MODULATION),
            Keep("norm_out.linear", MODULATION),
            Keep("proj_out", LAST),
        ),
    ),
    Family(
        "chroma",
        ("ChromaTransformer2DModel",),
        keep=(
            Keep("x_embedder", FIRST),
            # Makes the modulation of all blocks, from one row for each.
            Keep("distilled_guidance_layer.*", MODULATION),
            Keep("context_embedder", TEXT),
            Keep("proj_out", LAST),
        ),
    ),
    Family(
        "qwenimage",
        ("QwenImageTransformer2DModel",),
        keep=(
            Keep("img_in", FIRST),
            Keep("time_text_embed.*", CONDITION),
            Keep("txt_in", TEXT),
            Keep("*.img_mod.1", MODULATION),
            Keep("*.txt_mod.1", MODULATION),
            Keep("norm_out.linear", MODULATION),
            Keep("proj_out", LAST),
        ),
        # Of the layered variant: two rows, for a condition and for the picture.
        not_layers=("time_text_embed.addition_t_embedding",),
    ),
    Family(
        "zimage",
        ("ZImageTransformer2DModel",),
        keep=(
            Keep("all_x_embedder.*", FIRST),
            Keep("t_embedder.mlp.*", CONDITION),
            Keep("cap_embedder.*", TEXT),
            Keep("*.adaLN_modulation.*", MODULATION),
            Keep("all_final_layer.*.linear", LAST),
        ),
    ),
    Family(
        "wan",
        ("WanTransformer3DModel",),
        # patch_embedding reads the latent, a Conv3d.
        keep=(
            Keep("condition_embedder.time_embedder.*", CONDITION),
            Keep("condition_embedder.time_proj", MODULATION),
            Keep("condition_embedder.text_embedder.*", TEXT),
            Keep("condition_embedder.image_embedder.*", TEXT),
            Keep("proj_out", LAST),
        ),
    ),
    Family(
        "ltx",
        ("LTXVideoTransformer3DModel",),
        keep=(
            Keep("proj_in", FIRST),
            Keep("time_embed.*", MODULATION),
            Keep("caption_projection.*", TEXT),
            Keep("proj_out", LAST),
        ),
    ),
)

GENERAL = Family(
    "general",
    (),
    by_structure=True,
    keep=(
        # Lumina's reads what norm_out.linear_1 scales, and writes the latent.
        Keep("norm_out.linear_2", LAST),
        Keep("*adaln*", MODULATION),
        Keep("*adaLN*", MODULATION),
        Keep("*modulation*", MODULATION),
        Keep("*_mod", MODULATION),
        Keep("*_mod.*", MODULATION),
        Keep("*.norm*.linear", MODULATION),
        Keep("*.norm*.linear_[12]", MODULATION),
        Keep("norm_out.linear*", MODULATION),
        Keep("*.norm_out.linear*", MODULATION),
        Keep("final_norm.linear", MODULATION),
        Keep("*.time_emb_proj", MODULATION),
        Keep("*time_proj", MODULATION),
        Keep("time_mod_proj", MODULATION),
        Keep("*scale_shift*", MODULATION),
        Keep("*_gate.linear", MODULATION, outside=True),
        Keep("t_block.*", MODULATION),
        # Kandinsky 3, Stable Cascade, T5 FiLM.
        Keep("*.context_mlp.*", MODULATION),
        Keep("*.mapper", MODULATION),
        Keep("*.mapper_*", MODULATION),
        Keep("*.FiLMLayer.*", MODULATION),
        Keep("*.film.*", MODULATION),
        Keep("*time_emb*", CONDITION),
        Keep("*time_text*", CONDITION),
        Keep("*time_caption*", CONDITION),
        Keep("*time_guidance*", CONDITION),
        Keep("*time_condition*", CONDITION),
        Keep("*time_step*", CONDITION),
        Keep("*time_extra*", CONDITION),
        Keep("*timestep*", CONDITION),
        Keep("*guidance*", CONDITION),
        Keep("*pooled*", CONDITION),
        Keep("*class_emb*", CONDITION),
        Keep("time_in.*", CONDITION),
        Keep("t_embed*", CONDITION),
        Keep("add_embedding.*", CONDITION),
        Keep("fps_embedding.*", CONDITION),
        Keep("*global*", CONDITION, outside=True),
        Keep("*text_embed*", TEXT),
        Keep("*context_embed*", TEXT),
        Keep("*caption*", TEXT),
        Keep("*text_proj*", TEXT, outside=True),
        Keep("*_cond_*", TEXT, outside=True),
        Keep("txt_in*", TEXT),
        Keep("cap_embed*", TEXT),
        Keep("img_emb.*", TEXT),
        Keep("encoder_hid*", TEXT),
        Keep("y_embedder.*", TEXT),
        Keep("clip_*", TEXT),
        Keep("image_embedder.*", TEXT),
        Keep("embedding_proj", TEXT),
        Keep("cond_embed.*", CONDITION),
        Keep("condition_embedder*", CONDITION),
        Keep("*x_embed*", FIRST, outside=True),
        Keep("*patch_emb*", FIRST, outside=True),
        Keep("pos_embed.proj", FIRST),
        Keep("*conv_in", FIRST, outside=True),
        Keep("*proj_in", FIRST, outside=True),
        Keep("img_in", FIRST),
        Keep("input_proj", FIRST),
        Keep("visual_embed*", FIRST),
        Keep("*conv_out", LAST, outside=True),
        Keep("*proj_out*", LAST, outside=True),
        Keep("final_*", LAST),
        Keep("out_layer.*", LAST),
        Keep("clf.*", LAST),
        Keep("lm_head", LAST),
        Keep("*", FIRST, outside=True, widening=4),
        Keep("*", LAST, outside=True, narrowing=4),
        # 24 heads that share one would have as much; 32 are not known to.
        Keep("*", FEW, narrowing=32),
        Keep("*", UNKNOWN, outside=True),
    ),
)

#: What diffusers has beside denoisers: globs on class names.
_NO_DENOISERS = (
    "*Autoencoder*", "*Adapter*", "*ControlNet*", "*Decoder", "*DecoderModel", "*Embedder",
    "*Encoder", "*Head", "*Projection", "*ProjectionModel", "*Tokenizer", "*Detokenizer", "*VAE*",
    "*Vae", "*Vocoder", "AnimaTextConditioner", "Kandinsky6SRLatentUpscalerBank", "VQModel",
)  # fmt: skip


def is_denoiser(class_name: str) -> bool:
    """Return whether a model class of diffusers may be a denoiser, by its name."""
    return not any(fnmatchcase(class_name, pattern) for pattern in _NO_DENOISERS)


def find_family(class_name: str, name: str | None = None) -> Family:
    """Return the family of a denoiser class: that of its row, or the general one.

    Args:
        class_name: of diffusers.
        name: the family that the user wants instead.

    Raises:
        ModelError: no denoiser, or no family of this name.
    """
    if name is not None:
        return _named(name)
    for family in FAMILIES:
        if class_name in family.class_names:
            return family
    if not is_denoiser(class_name):
        raise ModelError(
            f"{class_name!s:.80} is no denoiser, as a unet or a transformer is; quantkit leaves it "
            "as it is"
        )
    return GENERAL


def _named(name: str) -> Family:
    for family in (*FAMILIES, GENERAL):
        if family.name == name:
            return family
    known = ", ".join(family.name for family in (*FAMILIES, GENERAL))
    raise ModelError(f"family {name!r:.80}: unknown, wanted one of {known}", fields=("family",))
