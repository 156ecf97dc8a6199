"""One literal row per model family: what stays in 16 bit and why, and what is no layer.

The rows follow the module structure in diffusers; ``tests/golden/keys_*.json.gz`` hold the modules
of published models, and every row is tested against them.
"""

from dataclasses import dataclass

from quantkit.errors import ModelError
from quantkit.recipe.schema import matches


@dataclass(frozen=True)
class Keep:
    """Layers that stay in 16 bit."""

    #: glob on the module path
    pattern: str
    reason: str


@dataclass(frozen=True)
class Skips:
    """Layers that read a skip concatenation: what came before, then what the skip brought."""

    #: globs on the layers that read one
    readers: tuple[str, ...]
    #: globs on the layers whose output channels flow on, stage after stage as the model runs them:
    #: the last one before a reader gives the channels of its first half
    writers: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """The denoisers that share a module structure."""

    name: str
    #: ``_class_name`` in config.json
    class_names: tuple[str, ...]
    keep: tuple[Keep, ...]
    #: globs on modules whose 2-D or 4-D weight is not that of a Linear or a dense Conv2d:
    #: embedding tables, grouped convolutions
    not_layers: tuple[str, ...] = ()
    skips: Skips | None = None

    def packs_alone(self, layer: str) -> bool:
        """Return whether a recipe may pack a kept layer, as a weight alone.

        Not what reads or writes the latent: a per mille of the bytes, and all of the picture.
        """
        return self.keep_reason(layer) not in {None, _FIRST, _LAST}

    def keep_reason(self, layer: str) -> str | None:
        """Return why the layer stays in 16 bit, or None when it is packed."""
        for keep in self.keep:
            if matches(layer, (keep.pattern,)):
                return keep.reason
        return None


_CONDITION = "embeds timestep or condition: one row per image, and its error reaches every layer"
_TEXT = "embeds the prompt once per image; its error reaches every block"
_MODULATION = "scales and shifts whole channels from one row per image: nothing to gain in speed"
_FIRST = "reads the latent: few channels, and its error reaches every layer"
_LAST = "writes the latent: its error is the picture's"

FAMILIES: tuple[Family, ...] = (
    Family(
        "unet",
        ("UNet2DConditionModel",),
        keep=(
            Keep("conv_in", _FIRST),
            Keep("conv_out", _LAST),
            Keep("time_embedding.*", _CONDITION),
            Keep("add_embedding.*", _CONDITION),
            Keep("class_embedding", _CONDITION),
            Keep("class_embedding.*", _CONDITION),
            Keep("encoder_hid_proj", _TEXT),
            Keep("encoder_hid_proj.*", _TEXT),
            Keep("*.time_emb_proj", _MODULATION),
        ),
        # With num_class_embeds set, class_embedding is an nn.Embedding; kept either way.
        not_layers=("class_embedding",),
        skips=Skips(
            readers=("up_blocks.*.resnets.*.conv1", "up_blocks.*.resnets.*.conv_shortcut"),
            writers=(
                "down_blocks.*.resnets.*.conv2",
                "mid_block.resnets.*.conv2",
                "up_blocks.*.resnets.*.conv2",
            ),
        ),
    ),
    Family(
        "sd3",
        ("SD3Transformer2DModel",),
        keep=(
            Keep("pos_embed.proj", _FIRST),
            Keep("time_text_embed.*", _CONDITION),
            Keep("context_embedder", _TEXT),
            Keep("*.norm1.linear", _MODULATION),
            Keep("*.norm1_context.linear", _MODULATION),
            Keep("norm_out.linear", _MODULATION),
            Keep("proj_out", _LAST),
        ),
    ),
    Family(
        "flux",
        ("FluxTransformer2DModel",),
        keep=(
            Keep("x_embedder", _FIRST),
            Keep("time_text_embed.*", _CONDITION),
            Keep("context_embedder", _TEXT),
            Keep("*.norm1.linear", _MODULATION),
            Keep("*.norm1_context.linear", _MODULATION),
            Keep("single_transformer_blocks.*.norm.linear", _MODULATION),
            Keep("norm_out.linear", _MODULATION),
            Keep("proj_out", _LAST),
        ),
    ),
    Family(
        "pixart",
        ("PixArtTransformer2DModel",),
        keep=(
            Keep("pos_embed.proj", _FIRST),
            Keep("adaln_single.*", _MODULATION),
            Keep("caption_projection.*", _TEXT),
            Keep("proj_out", _LAST),
        ),
    ),
    Family(
        "sana",
        ("SanaTransformer2DModel",),
        keep=(
            Keep("patch_embed.proj", _FIRST),
            Keep("time_embed.*", _MODULATION),
            Keep("caption_projection.*", _TEXT),
            Keep("proj_out", _LAST),
        ),
        # Depthwise: K is 9, and one channel is no matrix product.
        not_layers=("*.ff.conv_depth",),
    ),
)


def find_family(class_name: str) -> Family:
    """Return the family of the denoiser class.

    Raises:
        ModelError: no row has it; the text lists the classes that have one.
    """
    for family in FAMILIES:
        if class_name in family.class_names:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.class_names)
    raise ModelError(f"denoiser {class_name!s:.80}: no family describes it, wanted one of {known}")
