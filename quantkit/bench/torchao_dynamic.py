"""torchao's dynamic FP8 and int8, in which its users compile their linear layers."""

from torch import nn


def quantize(model: nn.Module, kind: str, *, tuned: bool) -> nn.Module:
    """Give a model's linear layers 8-bit weights and dynamic inputs, scales per row, in place.

    Args:
        model: changed to bfloat16, which FP8's scales per row need.
        kind: fp8 or int8.
        tuned: torchao may change the compiler's settings, for the whole process: it tunes every
            kernel that is generated from then on.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.quantization import (  # type: ignore[import-not-found]
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    configs = {
        "fp8": Float8DynamicActivationFloat8WeightConfig,
        "int8": Int8DynamicActivationInt8WeightConfig,
    }
    model = model.bfloat16()
    quantize_(model, configs[kind](granularity=PerRow(), set_inductor_config=tuned))
    return model
