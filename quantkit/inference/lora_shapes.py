"""LoRA files of FLUX: the shape of a packed weight is that of the weight, not of its codes.

diffusers compares every Linear of the model with the file, to let control LoRAs widen an input. The
rows of int4 and 2:4 are half as long: it would replace such layers by wider ones, made of codes.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn

from quantkit.inference.packed_layer import PackedLayer

_METHOD = "_calculate_module_shape"


def register(module: ModuleType) -> None:
    """Let the mixins of ``diffusers.loaders.lora_pipeline`` know packed layers; twice is once."""
    for mixin in vars(module).values():
        original = vars(mixin).get(_METHOD) if isinstance(mixin, type) else None
        if original is not None and not hasattr(original.__func__, "quantkit_original"):
            setattr(mixin, _METHOD, staticmethod(_dense_shape(original.__func__)))


def _dense_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def shape_of(
        model: nn.Module,
        base_module: nn.Module | None = None,
        base_weight_param_name: str | None = None,
    ) -> Any:
        path = (base_weight_param_name or "").removesuffix(".weight")
        layer = model.get_submodule(path) if base_module is None and path else base_module
        layer = getattr(layer, "base_layer", layer)
        if isinstance(layer, PackedLayer):
            return torch.Size(layer.dense_shape)
        return original(model, base_module, base_weight_param_name)

    shape_of.quantkit_original = original  # type: ignore[attr-defined]
    return shape_of
