"""torchao's dynamic FP8, in which its users compile their linear layers."""

from enum import Enum

from torch import nn


class Tuning(Enum):
    """Whose settings torch.compile has for torchao's layers."""

    #: torchao's own: every generated kernel is tuned by coordinate descent, which takes minutes
    TORCHAO = "torchao"
    #: the compiler's, as every other contender has them
    DEFAULT = "default"


def quantize(model: nn.Module, tuning: Tuning) -> nn.Module:
    """Give a model's linear layers FP8 weights and dynamic inputs, scales per row, in place.

    Args:
        model: changed to bfloat16, which scales per row need.
        tuning: TORCHAO changes the compiler's settings for the whole process.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.quantization import (  # type: ignore[import-not-found]
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quantize_,
    )

    model = model.bfloat16()
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), set_inductor_config=tuning is Tuning.TORCHAO
    )
    quantize_(model, config)
    return model
