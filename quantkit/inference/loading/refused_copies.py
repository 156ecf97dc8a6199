"""Refusing models that diffusers makes from another model's weights, where those are codes."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from quantkit.errors import InputError
from quantkit.inference.layers.layer_summary import iterate_packed

_METHODS = ("from_unet", "from_unet2d", "from_transformer")


def register(module: ModuleType) -> None:
    """Let the classes of a module refuse a packed model; idempotent."""
    for made in vars(module).values():
        for name in _METHODS if isinstance(made, type) else ():
            method = vars(made).get(name)
            if method is not None and not hasattr(method.__func__, "quantkit_original"):
                setattr(made, name, classmethod(_refusing(method.__func__)))


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def from_dense(cls: type, *args: Any, **kwargs: Any) -> Any:
        for model in (*args, *kwargs.values()):
            if hasattr(model, "named_modules") and next(iterate_packed(model), None) is not None:
                raise InputError(
                    f"{cls.__name__}.{method.__name__}: {type(model).__name__} is packed, expected "
                    "16-bit weights to copy; pass the 16-bit model that was packed, or "
                    "model.dequantize()"
                )
        return method(cls, *args, **kwargs)

    from_dense.quantkit_original = method  # type: ignore[attr-defined]
    return from_dense
