"""Layers that compute as their packed form will, and pass gradients straight through.

The forward pass quantizes and dequantizes weight and input exactly as ``pack`` and the packed
modules do; the backward pass is that of the layer over its unquantized input and quantized weight.
Nothing waits for the device, so CUDA graphs can hold it. Weights keep their names: what owns them
(optimizer, average, masks) sees no difference. Zeros stay zeros, so masks need nothing here.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit.errors import ModelError, RecipeError
from quantkit.models.layer_plan import plan_layers
from quantkit.models.source import Component
from quantkit.numerics.scales import scale_of_amax
from quantkit.numerics.scheme import Activation
from quantkit.recipe.schema import Recipe
from quantkit.recovery.straight_through_estimator import (
    InputQuant,
    LayerQuant,
    QuantizedConv2d,
    QuantizedLinear,
    QuantizeWeight,
)

_STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def plan_quants(
    component: Component, recipe: Recipe, masked: Collection[str]
) -> dict[str, LayerQuant]:
    """Return the quantization of each layer of a component, without layers kept in 16 bit.

    Static scales are those of each batch, in one timestep bucket, whatever the recipe's buckets:
    the calibration that sets them is of the trained model, later.

    Args:
        component: the denoiser.
        recipe: what it will be packed with.
        masked: module paths of the layers that have a mask.

    Raises:
        RecipeError: smoothing, whose factors would be those of other weights; nothing to pack.
    """
    if recipe.smooth is not None:
        raise RecipeError(
            f"recipe {recipe.name}: smooth depends on the weights, which training changes; drop "
            "smooth, or do not quantize",
            fields=("quantize",),
        )
    planned = plan_layers(component, _one_bucket(recipe), calibrated=True, masked=masked)
    quants = {
        t.layer.name: LayerQuant(
            t.scheme,
            t.weight.scale_rule,
            _STORED[t.layer.weight.dtype],
        )
        for t in planned
        if t.scheme is not None
    }
    if not quants:
        raise RecipeError(
            f"recipe {recipe.name}: packs no layer of {component.path}; do not quantize",
            fields=("quantize",),
        )
    return quants


def install(model: nn.Module, quants: Mapping[str, LayerQuant]) -> None:
    """Replace layers of a model by ones that compute as packed, over the same parameters.

    Args:
        model: changed in place; names of parameters stay.
        quants: module path -> its treatment.

    Raises:
        ModelError: no such module, or one that cannot be packed.
    """
    for name, quant in quants.items():
        parent, _, child = name.rpartition(".")
        try:
            dense = model.get_submodule(name)
        except AttributeError as error:
            raise ModelError(
                f"{name}: the model that diffusers builds has no such module"
            ) from error
        setattr(model.get_submodule(parent), child, fake_quantized(name, dense, quant))


def fake_quantized(name: str, dense: nn.Module, quant: LayerQuant) -> "FakeQuantLayer":
    """Return the layer that computes as ``dense`` will when packed, over its parameters.

    Raises:
        ModelError: neither Linear nor Conv2d, or a Conv2d that cannot be packed.
    """
    if isinstance(dense, nn.Linear):
        return FakeQuantLinear(dense, quant)
    if isinstance(dense, nn.Conv2d) and dense.padding_mode == "zeros" and dense.groups == 1:
        return FakeQuantConv2d(dense, quant)
    raise ModelError(
        f"{name}: found {dense}, expected a Linear, or a Conv2d of one group padded with zeros; "
        "keep this layer in 16 bit"
    )


class FakeQuantLayer(nn.Module):
    """The base of FakeQuantLinear and FakeQuantConv2d: the parameters, and the quantized weight."""

    weight: Tensor
    bias: Tensor | None
    smooth: Tensor | None
    input_scale: Tensor | None

    def __init__(self, dense: nn.Linear | nn.Conv2d, quant: LayerQuant) -> None:
        super().__init__()
        self.quant = quant
        self.weight = dense.weight
        self.bias = dense.bias
        for part in ("smooth", "input_scale"):
            value = getattr(quant, part)
            moved = None if value is None else value.to(dense.weight.device, torch.float32)
            self.register_buffer(part, moved, persistent=False)

    def quantized_weight(self) -> Tensor:
        """Return the dequantized weight in float32; its gradient is the weight's."""
        result: Tensor = QuantizeWeight.apply(self.weight, self.smooth, self.quant)
        return result

    def extra_repr(self) -> str:
        """Return the shape and the treatment."""
        scheme = self.quant.scheme
        return (
            f"{list(self.weight.shape)}, {scheme.weight.name} per {scheme.granularity}, "
            f"activation={scheme.activation.value}"
        )

    def _smoothed(self, x: Tensor) -> Tensor:
        if self.smooth is None:
            return x
        channels = self.smooth.reshape(-1, 1, 1) if self.weight.ndim == 4 else self.smooth
        return x * channels

    def _input_scale(self, x: Tensor) -> Tensor | None:
        """Return the scale that all inputs share, or None where each token has its own."""
        if self.quant.scheme.activation is Activation.TOKEN:
            return None
        if self.input_scale is not None:
            return self.input_scale
        return scale_of_amax(x.detach().abs().amax(), self.quant.scheme.input)


class FakeQuantLinear(FakeQuantLayer):
    """A Linear over (..., K) that computes as PackedLinear does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., N)."""
        weight, smoothed = self.quantized_weight(), self._smoothed(x)
        if self.quant.scheme.activation is Activation.NONE:
            return functional.linear(smoothed.to(x.dtype), weight.to(x.dtype), self.bias)
        rows = smoothed.reshape(-1, x.shape[-1])
        how = InputQuant(self.quant.scheme.input, self._input_scale(smoothed))
        y: Tensor = QuantizedLinear.apply(rows, weight, self.bias, how)
        return y.reshape(*x.shape[:-1], -1)


class FakeQuantConv2d(FakeQuantLayer):
    """A Conv2d over (B, C, H, W) that computes as PackedConv2d does."""

    def __init__(self, dense: nn.Conv2d, quant: LayerQuant) -> None:
        super().__init__(dense, quant)
        self.stride = dense.stride
        self.dilation = dense.dilation
        #: left, right, top, bottom, as ``functional.pad`` takes them; covers padding="same"
        self.padding = tuple(dense._reversed_padding_repeated_twice)  # noqa: SLF001  the only place that resolves "same"

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, N, OH, OW)."""
        weight = self.quantized_weight()
        padded = functional.pad(self._smoothed(x), self.padding)
        if self.quant.scheme.activation is Activation.NONE:
            wide, narrow = padded.to(x.dtype), weight.to(x.dtype)
            return functional.conv2d(wide, narrow, self.bias, self.stride, 0, self.dilation)
        scale = self._input_scale(padded)
        how = InputQuant(self.quant.scheme.input, scale, self.stride, self.dilation)
        y: Tensor = QuantizedConv2d.apply(padded, weight, self.bias, how)
        return y


def _one_bucket(recipe: Recipe) -> Recipe:
    """Return the recipe with one scale for all timesteps."""
    activation = recipe.activation.model_copy(update={"buckets": 1})
    overrides = tuple(
        o if o.activation is None
        else o.model_copy(update={"activation": o.activation.model_copy(update={"buckets": 1})})
        for o in recipe.overrides
    )  # fmt: skip
    return recipe.model_copy(update={"activation": activation, "overrides": overrides})
