"""One literal row per family of VAEs: what stays in 16 bit and why.

VAEs without a row stay in 16 bit, those of videos (Wan, LTX) among them: their convolutions are
causal and three-dimensional, and no kernel reads such windows.
"""

from quantkit.models.family import Family, Keep

_READS = "reads the picture or the latent: few channels, and its error reaches every layer"
_WRITES = "writes the picture or the latent: few channels, and its error is the picture's"

VAES: tuple[Family, ...] = (
    Family(
        "autoencoder-kl",
        ("AutoencoderKL", "AutoencoderKLFlux2"),
        keep=(
            Keep("encoder.conv_in", _READS),
            Keep("encoder.conv_out", _WRITES),
            Keep("quant_conv", _WRITES),
            Keep("post_quant_conv", _READS),
            Keep("decoder.conv_in", _READS),
            Keep("decoder.conv_out", _WRITES),
        ),
    ),
)


def find_vae(class_name: str) -> Family:
    """Return the family of a VAE's class, which ``is_vae``."""
    return next(family for family in VAES if class_name in family.class_names)


def is_vae(name: str, class_name: str) -> bool:
    """Tell whether a component of diffusers is a VAE that is packed where a recipe asks.

    Args:
        name: of the component, as model_index.json has it.
        class_name: of the component.
    """
    del name
    return any(class_name in family.class_names for family in VAES)
