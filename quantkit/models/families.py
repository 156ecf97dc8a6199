"""One literal row per tuned family of denoisers, and one for all others.

The rows follow the module structure in diffusers; ``tests/golden/keys_*.json.gz`` hold the modules
of published models, and every row is tested against them. What no row is for is ``GENERAL``, and
tiny models of most classes are packed by the tests.
"""

from fnmatch import fnmatchcase
from typing import Any

from quantkit.errors import ModelError
from quantkit.models.family import (
    CONDITION,
    FIRST,
    LAST,
    MODULATION,
    TEXT,
    Family,
    Keep,
)
from quantkit.models.general_family import GENERAL

#: Weights of transformers that stay in 16 bit are in INT8 weights alone: they have few rows to
#: multiply, but up to a third of the bytes.
_INT8_KEPT = {"int8": {"kept": {"format": "int8", "observer": "mse"}}}
#: The convolutions of a UNet with windows.
_WINDOWS = ("*.conv1", "*.conv2", "*.downsamplers.*.conv", "*.upsamplers.*.conv")


def _static(buckets: int, observer: str) -> dict[str, Any]:
    """Return an input scale for each stretch of the schedule."""
    return {"mode": "static", "observer": observer, "buckets": buckets}


#: What the last step rounds stays in the picture: with a scale per token in one step of 20 int8's
#: SSIM is 0.996 instead of 0.993; SDXL's last step takes 35 ms on an H200, and the others 20.
_STATIC_BUT_LAST = {**_static(5, "amax"), "token_below": 50}
#: A hundredth of SDXL's weights: in int8 instead of int4 the demo's SSIM is 0.986 and not 0.980.
_UP_PROJECTIONS = ("up_blocks.*.conv_shortcut", "up_blocks.*.proj_in", "up_blocks.*.proj_out")
#: Keys and values of a prompt are computed once, unless their scale depends on the timestep.
_PROMPT_PER_TOKEN = {
    "overrides": [{"layers": ("*.attn2.to_k", "*.attn2.to_v"), "activation": {"mode": "token"}}],
    "unmatched": "ignore",
}


def _alone(*layers: str) -> dict[str, dict[str, Any]]:
    """Return recipes that pack modulation as weights alone.

    It sees one row per image: too few for second moments, and no speed in FP8 inputs. As stored
    weights it saves memory: a quarter of FLUX.1's weights, a third of SD3-medium's.
    """
    own = {"layers": layers, "keep": False, "sparse": False, "activation": {"mode": "none"}}
    nearest = {"overrides": [{**own, "weight": {"observer": "mse"}}], "unmatched": "ignore"}
    return {
        "fp8": {"overrides": [own], "unmatched": "ignore"},
        "fp8-gptq": nearest,
        "fp8-sparse-budget": {**nearest, "smooth": "auto"},
    }


def _steps(prompts: int, steps: int, batch: int, buckets: int) -> dict[str, Any]:
    """Return the calibration settings, with second moments of a quarter of the rows."""
    sizes = {"prompts": prompts, "steps": steps, "batch": batch, "buckets": buckets}
    return {**sizes, "row_share": 0.25}


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
        calibration=_steps(32, 25, 1, 5),
        recipes={
            # A scale per token of a convolution is one per window: windows are unfolded in 16 bit
            # first, which took 17 ms of SDXL's step on an H200 and 0.8 GB; float16 convolutions
            # took 7.6. Static scales unfold nothing.
            "fp8": {
                "overrides": [{"layers": _WINDOWS, "activation": {"mode": "none"}}],
                "unmatched": "ignore",
            },
            "int8": {"activation": _STATIC_BUT_LAST, **_PROMPT_PER_TOKEN},
            "int4": {
                "overrides": [
                    {"layers": _WINDOWS, "activation": _STATIC_BUT_LAST},
                    {"layers": _UP_PROJECTIONS, "weight": {"format": "int8"}},
                ],
                "unmatched": "ignore",
            },
            "fp8-gptq": {"activation": _static(5, "mse"), **_PROMPT_PER_TOKEN},
        },
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
        calibration=_steps(32, 28, 1, 7),
        recipes={**_INT8_KEPT, **_alone("*.norm1.linear", "*.norm1_context.linear")},
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
        calibration=_steps(32, 28, 1, 7),
        recipes={
            **_INT8_KEPT,
            **_alone(
                "*.norm1.linear",
                "*.norm1_context.linear",
                "single_transformer_blocks.*.norm.linear",
            ),
        },
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
        calibration=_steps(32, 20, 2, 5),
        recipes=_INT8_KEPT,
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
        calibration=_steps(32, 20, 2, 5),
        recipes=_INT8_KEPT,
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
        calibration=_steps(32, 28, 1, 7),
        recipes=_INT8_KEPT,
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
        calibration=_steps(32, 35, 1, 7),
        recipes=_INT8_KEPT,
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
        calibration=_steps(32, 50, 1, 10),
        recipes={**_INT8_KEPT, **_alone("*.img_mod.1", "*.txt_mod.1")},
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
        # It is called with 1 - t / 1000, of which no bucket is told.
        calibration={**_steps(32, 9, 1, 1), "guidance": 0.0},
        recipes=_INT8_KEPT,
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
        # Of two experts each sees a part of the schedule.
        calibration=_steps(8, 40, 1, 1),
        recipes=_INT8_KEPT,
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
        calibration=_steps(8, 50, 1, 5),
        recipes=_INT8_KEPT,
    ),
)

#: Models of diffusers that are no denoisers: globs on class names.
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
    raise ModelError(f"family {name!r:.80}: unknown, expected one of {known}")
