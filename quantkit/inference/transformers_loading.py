"""Packed text encoders are refused: transformers only warns of an unknown method and loads codes.

quantkit packs denoisers. Were "quantkit" unknown to transformers, a config.json that names it would
load raw codes as if they were weights; known and refused, it ends in one line.
"""

from types import ModuleType
from typing import Any, NoReturn

from quantkit.errors import CheckpointError


def register(module: ModuleType) -> None:
    """Add the refusal to the tables of ``transformers.quantizers.auto``."""
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class QuantkitRefusal(QuantizationConfigMixin):  # type: ignore[misc]  # untyped base
        """Stands in transformers' table of configurations; cannot be made."""

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> NoReturn:
            """Refuse, before any weight is read.

            Raises:
                CheckpointError: always.
            """
            del kwargs
            raise CheckpointError(
                "config.json of a transformers model: quant_method "
                f"{config_dict.get('quant_method')!r}, wanted none: quantkit packs the denoiser "
                "(unet or transformer) of a pipeline; use the 16-bit text encoder"
            )

    module.AUTO_QUANTIZATION_CONFIG_MAPPING["quantkit"] = QuantkitRefusal
    # Looked up only after the configuration, which never gets that far.
    module.AUTO_QUANTIZER_MAPPING["quantkit"] = QuantkitRefusal
