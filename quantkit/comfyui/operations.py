"""ComfyUI's operations with packed weights: Linear and Conv2d that multiply by quantkit's kernels.

A weight is a parameter of ComfyUI's own module, so ComfyUI moves and patches it as any other. What
its cast returns packed is multiplied packed; a weight that a patch made dense is multiplied dense.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy.ops import cast_bias_weight, manual_cast, uncast_bias_weight
from torch import Tensor, nn

from quantkit.comfyui.layout import is_packed, packed_layer, parts_of
from quantkit.errors import InputError
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.numerics.scheme import Schedule

#: By schedule, of the model that operations belong to.
Buckets = Mapping[Schedule, TimestepBuckets]


@dataclass(eq=False)
class Surroundings:
    """The parts that the modules of a model share."""

    #: filled before the model's first call
    buckets: Buckets = field(default_factory=dict)
    #: called before a packed weight is moved or patched
    changes: Callable[[], None] = lambda: None


def make_operations(surroundings: Surroundings) -> Any:
    """Return what ComfyUI calls the operations of a model: a class of module classes.

    Args:
        surroundings: of the model.
    """
    members = {
        name: type(name, (_Packable, getattr(manual_cast, name)), {"surroundings": surroundings})
        for name in ("Linear", "Conv2d")
    }
    return type("QuantkitOperations", (manual_cast,), members)


class _Packable:
    """The common part of Linear and Conv2d: a weight that may be packed."""

    #: set by ``make_operations``
    surroundings: Surroundings
    weight: Any
    bias: Any
    _parameters: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Without memory: the state dict's tensors take the place of what is made here.
        super().__init__(*args, **{**kwargs, "device": "meta"})
        self._multiplier = _Multiplier()
        self._functions: list[Callable[[Tensor], Tensor]] = []
        self._patch: Callable[[Tensor], Tensor] | None = None

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take the tensors of a state dict, a packed weight as it is."""
        missing = args[2] if len(args) > 2 else kwargs["missing_keys"]
        for name, made in self._parameters.items():
            if made is None:
                continue
            value = state_dict.get(prefix + name)
            if value is None:
                missing.append(prefix + name)
                value = torch.zeros(made.shape, dtype=made.dtype)
            elif not is_packed(value):
                value = value.to(made.dtype)
            self._parameters[name] = nn.Parameter(value, requires_grad=False)

    @property
    def weight_function(self) -> list[Callable[[Tensor], Tensor]]:
        """The functions that ComfyUI calls on the dense weight before each product."""
        return self._functions if self._patch is None else [self._patch, *self._functions]

    @weight_function.setter
    def weight_function(self, functions: list[Callable[[Tensor], Tensor]]) -> None:
        self._functions = functions

    @property
    def weight_lowvram_function(self) -> None:
        """Nothing: ComfyUI would quantize what such a function returns, to keep it.

        What it sets stands among ``weight_function``, which are called at each product.
        """

    @weight_lowvram_function.setter
    def weight_lowvram_function(self, patch: Callable[[Tensor], Tensor] | None) -> None:
        self._patch = patch

    def forward_comfy_cast_weights(self, input: Tensor) -> Tensor:  # noqa: A002  ComfyUI's name
        """Return the product, by kernels where the weight is packed."""
        stays_packed = is_packed(self.weight) and not self.weight_function
        # Asked for another dtype than the weight's, ComfyUI's cast returns a dense one.
        dtype = self.weight.dtype if stays_packed else input.dtype
        weight, bias, stream = cast_bias_weight(
            self, input, dtype=dtype, bias_dtype=input.dtype, offloadable=True
        )
        try:
            if is_packed(weight):
                return self._multiplier.of(self, weight, bias)(input)  # type: ignore[no-any-return]
            return _dense_product(self, input, weight, bias)
        finally:
            uncast_bias_weight(self, weight, bias, stream)

    def convert_weight(self, weight: Any, **_: Any) -> Tensor:
        """Return the dense weight that ComfyUI patches."""
        dense: Tensor = weight.dequantize() if is_packed(weight) else weight
        return dense

    def set_weight(
        self,
        weight: Tensor,
        inplace_update: bool = False,  # noqa: FBT001, FBT002  ComfyUI's signature
        return_weight: bool = False,  # noqa: FBT001, FBT002
        **_: Any,
    ) -> Tensor | None:
        """Take a patched weight, dense: codes would lose what a patch adds.

        Raises:
            InputError: it has to be written into the packed one.
        """
        dense = weight.to(self.weight.dtype)
        if return_weight:
            return dense
        self.surroundings.changes()
        if inplace_update and is_packed(self.weight):
            raise InputError(
                f"{self.weight.params.layer}: is packed, and a LoRA on a schedule (hooks) is "
                "written into the weights; load it with LoraLoader, for all steps"
            )
        self.weight = nn.Parameter(dense, requires_grad=False)
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002  torch's signature
        weight = self._parameters["weight"]
        self.surroundings.changes()
        if not is_packed(weight):
            return super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module's
        self._parameters["weight"] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            moved = fn(weight)
            if not torch.is_inference_mode_enabled() and weight.is_inference():
                moved = moved.clone()  # what was loaded in inference mode cannot be a parameter
            self._parameters["weight"] = nn.Parameter(moved, requires_grad=False)
        return self


class _Multiplier:
    """The packed layer of the weight that was multiplied last; its launches are kept."""

    def __init__(self) -> None:
        self.layer: PackedLayer | None = None
        self.weight: Any = None
        self.bias: Any = None

    def of(self, module: _Packable, weight: Any, bias: Tensor | None) -> PackedLayer:
        """Return the packed layer that multiplies by ``weight``.

        Args:
            module: the Linear or Conv2d that it belongs to.
            weight: packed.
            bias: in the input's dtype.
        """
        if self.layer is not None and weight is self.weight and bias is self.bias:
            return self.layer
        params = weight.params
        parts = parts_of(weight._qdata, params)  # noqa: SLF001  its interface
        if self.layer is None:
            schedule = params.scheme.schedule
            buckets = None if schedule is None else module.surroundings.buckets.get(schedule)
            self.layer = packed_layer(parts, params, buckets, like=module)  # type: ignore[arg-type]
        elif weight is not self.weight:
            for part, tensor in parts.items():
                self.layer.fill(part, tensor)
        self.layer.register_parameter("bias", _as_parameter(bias))
        self.weight, self.bias = weight, bias
        return self.layer


def _as_parameter(bias: Tensor | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(bias, requires_grad=False)


def _dense_product(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    y: Tensor = module._conv_forward(x, weight, bias)  # noqa: SLF001  circular padding lies there
    return y
