"""torchao's dynamic FP8 and int8, in which its users compile their linear layers."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor, nn

#: torch._int_mm, which torchao's int8 calls, refuses fewer rows.
_INT8_ROWS = 17


def short_layers(model: nn.Module, step: Callable[[], object]) -> frozenset[str]:
    """Return the linear layers that see fewer rows in a step than torchao's int8 can multiply.

    Those are the ones that see the timestep and the pooled prompt.
    """
    found: set[str] = set()

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs[0].numel() // inputs[0].shape[-1] < _INT8_ROWS:
                found.add(name)

        return note

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        step()
    return frozenset(found)


def quantize(
    model: nn.Module, kind: str, *, tuned: bool, keep: frozenset[str] = frozenset()
) -> nn.Module:
    """Give a model's linear layers 8-bit weights and dynamic inputs, scales per row, in place.

    Args:
        model: changed to bfloat16, which FP8's scales per row need.
        kind: fp8 or int8.
        tuned: torchao may change the compiler's settings, for the whole process: it tunes every
            kernel that is generated from then on.
        keep: linear layers that stay in bfloat16.

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
    quantize_(
        model,
        configs[kind](granularity=PerRow(), set_inductor_config=tuned),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and name not in keep,
    )
    return model
