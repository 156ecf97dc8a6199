"""The layout of packed weights in ComfyUI: a ``QuantizedTensor`` whose parts are FORMAT.md's.

ComfyUI moves, pins, counts and offloads a weight by its ``QuantizedTensor``: the codes, and the
tensors among its parameters. Shape and dtype are those of the dense weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from comfy_kitchen.tensor import (
    BaseLayoutParams,
    QuantizedLayout,
    QuantizedTensor,
    register_layout_class,
)
from torch import Tensor, nn

from quantkit.checkpoint.spec import kind_of
from quantkit.errors import InputError
from quantkit.inference.layers.modules import pack_module
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.numerics.scheme import Scheme

LAYOUT = "QuantkitLayout"

#: FORMAT.md's parts -> the fields of ``PackedParams``; the codes are the tensor's own.
_FIELDS = {
    "weight_scale": "scale",
    "weight_meta": "meta",
    "weight_group": "group",
    "input_scale": "input_scale",
    "input_smooth": "input_smooth",
}


@dataclass(frozen=True)
class PackedParams(BaseLayoutParams):  # type: ignore[misc]  # no types
    """A packed weight without its codes: other tensors of FORMAT.md, name, scheme."""

    meta: Tensor | None
    group: Tensor | None
    input_scale: Tensor | None
    input_smooth: Tensor | None
    layer: str
    scheme: Scheme

    def _tensor_fields(self) -> list[str]:
        return [field for field in _FIELDS.values() if getattr(self, field) is not None]


class QuantkitLayout(QuantizedLayout):  # type: ignore[misc]  # no types
    """Packed weights of quantkit, as comfy-kitchen asks for them."""

    Params = PackedParams

    @classmethod
    def quantize(cls, *_: Any, **__: Any) -> tuple[Tensor, Any]:
        """Refuse: codes are made by ``quantkit pack``.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a packed weight takes no other values: what changes it while it is packed (a LoRA on "
            "a schedule, training) needs the 16-bit model"
        )

    @classmethod
    def dequantize(cls, qdata: Tensor, params: PackedParams) -> Tensor:
        """Return the dense weight, in the weight's dtype."""
        return packed_layer(parts_of(qdata, params), params, None).dense_weight()

    @classmethod
    def get_plain_tensors(cls, qtensor: Any) -> tuple[Tensor, ...]:
        """Return the codes, then the other parts."""
        return tuple(parts_of(qtensor._qdata, qtensor._params).values())  # noqa: SLF001  its interface

    @classmethod
    def state_dict_tensors(cls, qdata: Tensor, params: PackedParams) -> dict[str, Tensor]:
        """Return the codes, and the other parts by their fields' names after the weight's."""
        fields = params._tensor_fields()  # noqa: SLF001  its interface
        return {"": qdata, **{f"_{field}": getattr(params, field) for field in fields}}


register_layout_class(LAYOUT, QuantkitLayout)


def packed_weight(
    layer: str,
    scheme: Scheme,
    parts: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """Return a layer's weight as ComfyUI holds it.

    Args:
        layer: its name, for messages.
        scheme: its treatment.
        parts: its tensors as FORMAT.md names them.
        shape: of the dense weight.
        dtype: of the dense weight: float16, bfloat16 or float32.
    """
    fields = {field: parts.get(part) for part, field in _FIELDS.items()}
    params = PackedParams(
        orig_dtype=dtype, orig_shape=tuple(shape), layer=layer, scheme=scheme, **fields
    )
    return QuantizedTensor(parts["weight"], LAYOUT, params)


def is_packed(weight: object) -> bool:
    """Tell whether a weight is a packed one of quantkit."""
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == LAYOUT  # noqa: SLF001  its interface


def parts_of(qdata: Tensor, params: PackedParams) -> dict[str, Tensor]:
    """Return the tensors of FORMAT.md of a packed weight."""
    found = {part: getattr(params, field) for part, field in _FIELDS.items()}
    return {"weight": qdata, **{part: t for part, t in found.items() if t is not None}}


def packed_layer(
    parts: Mapping[str, Tensor],
    params: PackedParams,
    buckets: TimestepBuckets | None,
    like: nn.Module | None = None,
) -> PackedLayer:
    """Return the layer that multiplies by a packed weight, without a bias.

    Args:
        parts: the weight's tensors; kept, not copied.
        params: of the weight.
        buckets: of a weight with a scale for each timestep.
        like: the convolution whose stride, padding and dilation it has; None: those of a Conv2d.
    """
    dense = _stand_in(params, like)
    layer = pack_module(params.layer, params.scheme, dense, buckets)
    for part, tensor in parts.items():
        layer.fill(part, tensor)
    return layer


def _stand_in(params: PackedParams, like: nn.Module | None) -> nn.Module:
    """Return a layer without memory, of the dense weight's shape."""
    where: Any = {"bias": False, "device": "meta", "dtype": params.orig_dtype}
    n, k, *kernel = params.orig_shape
    if kind_of(params.orig_shape) == "linear":
        return nn.Linear(k, n, **where)
    names = ("stride", "padding", "dilation")
    steps = {} if like is None else {name: getattr(like, name) for name in names}
    return nn.Conv2d(k, n, kernel, **steps, **where)
