"""Offloading by accelerate that moves the codes of a layer, not its dense ``weight``.

It looks a parameter up as an attribute of its module, by the name that the module keeps it under:
``weight``, which of a packed layer is dense.
"""

from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from quantkit.inference.layers.packed_layer import PackedLayer, bare

_FUNCTION = "set_module_tensor_to_device"


def register(module: ModuleType) -> None:
    """Patch a module of accelerate to move codes; idempotent."""
    original = vars(module)[_FUNCTION]
    if hasattr(original, "quantkit_original"):
        return

    @wraps(original)
    def set_tensor(module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        path, _, name = tensor_name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(owner, PackedLayer):
            return original(bare(owner), name, *args, **kwargs)
        return original(module, tensor_name, *args, **kwargs)

    set_tensor.quantkit_original = original  # type: ignore[attr-defined]
    setattr(module, _FUNCTION, set_tensor)
