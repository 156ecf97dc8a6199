"""torchao's dynamic FP8, in which its users compile their linear layers."""

from torch import nn


def quantize(model: nn.Module, *, tuned: bool) -> nn.Module:
    """Give a model's linear layers FP8 weights and dynamic inputs, scales per row, in place.

    Args:
        model: changed to bfloat16, which scales per row need.
        tuned: torchao may change the compiler's settings, for the whole process: it tunes every
            kernel that is generated from then on.

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
        granularity=PerRow(), set_inductor_config=tuned
    )
    quantize_(model, config)
    return model
