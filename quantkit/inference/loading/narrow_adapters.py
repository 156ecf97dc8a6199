"""Adapters with fewer columns than a packed layer, padded to the width of the dense weight.

FLUX's Fill and Control models take LoRAs of FLUX, whose first layer is narrower. diffusers pads
them to the width of a weight in the state dict, where two int4 codes are one column.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import functional

from quantkit.inference.layers.layer_summary import iterate_packed

_METHOD = "_maybe_expand_lora_state_dict"
_PART = ".lora_A.weight"


def register(module: ModuleType) -> None:
    """Patch the classes that pad adapters; idempotent.

    Args:
        module: ``diffusers.loaders.lora_pipeline``.
    """
    for made in vars(module).values():
        method = vars(made).get(_METHOD) if isinstance(made, type) else None
        if method is not None and not hasattr(method.__func__, "quantkit_original"):
            setattr(made, _METHOD, classmethod(_padding(method.__func__)))


def _padding(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def expand(cls: Any, transformer: Any, lora_state_dict: dict[str, Tensor]) -> Any:
        widths = {
            f"{cls.transformer_name}.{name.removesuffix('.base_layer')}{_PART}": layer.k
            for _, name, layer in iterate_packed(transformer)
            if layer.kind == "linear"
        }
        wide = {key: _padded(down, widths.get(key)) for key, down in lora_state_dict.items()}
        return method(cls, transformer, wide)

    expand.quantkit_original = method  # type: ignore[attr-defined]
    return expand


def _padded(down: Tensor, width: int | None) -> Tensor:
    """Return a matrix (rank, K) padded with zero columns to a width; unchanged without one."""
    missing = 0 if width is None else width - down.shape[-1]
    return functional.pad(down, (0, missing)) if missing > 0 else down
