"""Packed layers that can be trained: their codes, scales and biases are parameters.

The forward pass is that of a packed layer with the codes that would be written now. The backward
pass lets gradients through every rounding as if it were none (a straight-through estimator, Bengio
et al. 2013, arXiv:1308.3432), and gives those of scales as LSQ does (Esser et al. 2020,
arXiv:1902.08153). Positions of 2:4, factors of int4, smoothing and scales of inputs stay.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES
from quantkit.device.backends import Backend, use
from quantkit.errors import ModelError
from quantkit.inference.layers.modules import PackedConv2d, pack_module, smoothed
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.models.skeleton import why_not_packed
from quantkit.numerics.conv_windows import Windows
from quantkit.numerics.nibbles import GROUP, pack_nibbles, unpack_nibbles
from quantkit.numerics.packed_2to4 import from_rows, unpack_two_of_four
from quantkit.numerics.scales import cast, expand_scale
from quantkit.numerics.scheme import Activation, Scheme

#: A code's parameter is the code over this many of its largest: of the size that weights of
#: networks have, so that one learning rate serves them, biases and norms.
_REACH = 4.0

_CURE = "give what was packed from this model"

#: The child of a model that knows the timesteps of a call.
_TIMESTEPS = "quantkit_timesteps"


class Timesteps(nn.Module):
    """The timesteps of the present call of a model, one per row of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.values: Tensor | None = None

    def buckets(self, edges: Tensor, rows: int) -> Tensor:
        """Return the bucket of every row of a layer's input: int64, (rows,).

        Args:
            edges: ascending, float64.
            rows: a multiple of the batch, which comes first where a model joins other axes to it;
                or fewer, of an input that all rows of the batch share.
        """
        assert self.values is not None, "the model itself is called"
        found = torch.bucketize(self.values.to(edges), edges, right=True)
        # What is shared has no timestep of its own in a batch of several: any of theirs will do.
        return found.repeat_interleave(max(1, rows // len(found)))[:rows]


class TrainedLayer(nn.Module):
    """The base of TrainedLinear and TrainedConv2d: codes, scales, and the weight they make."""

    start: Tensor
    edges: Tensor
    #: of each bucket, where there are any
    input_scales: Tensor
    #: float64 (1,): the timestep below which rows have scales of their own, where there is one
    token_edge: Tensor

    def __init__(
        self,
        dense: nn.Linear | nn.Conv2d,
        scheme: Scheme,
        parts: Mapping[str, Tensor],
        timesteps: Timesteps,
    ) -> None:
        """Take over the tensors of a packed layer.

        Args:
            dense: the layer of the same shape, whose bias is trained.
            scheme: of the packed layer.
            parts: by the last part of their names in FORMAT.md.
            timesteps: of the model that the layer belongs to.
        """
        super().__init__()
        device = dense.weight.device
        self.scheme = scheme
        self.shape = tuple(dense.weight.shape)
        self.timesteps = (timesteps,)  # a tuple hides it from the module tree
        given = {name: value.to(device) for name, value in parts.items()}
        codes, scale = _codes_of(given, scheme), given["weight_scale"].float()
        # A scale of zeros is 1, far from what its weights would need.
        scale = scale * _has_codes(codes, scale)
        self.codes = nn.Parameter(codes / self._unit)
        #: logarithm of what the scale is multiplied by
        self.growth = nn.Parameter(torch.zeros_like(scale))
        self.bias = dense.bias
        self.register_buffer("start", scale, persistent=False)
        if scheme.buckets:
            edges = torch.tensor(scheme.buckets, dtype=torch.float64, device=device)
            self.register_buffer("edges", edges, persistent=False)
            self.register_buffer("input_scales", given["input_scale"], persistent=False)
        if scheme.token_below is not None:
            edge = torch.tensor([scheme.token_below], dtype=torch.float64, device=device)
            self.register_buffer("token_edge", edge, persistent=False)
        layer = _layer_of(dense, scheme, given)
        # A tuple hides it from the module tree: its parameters are not those that are trained.
        self._hidden = (layer,)
        self._of_tokens = () if scheme.token_below is None else (_twin_of_tokens(dense, layer),)

    @property
    def _layer(self) -> PackedLayer:
        """The packed layer that multiplies."""
        return self._hidden[0]

    @property
    def _unit(self) -> float:
        return _REACH * self.scheme.weight.max

    def rounded_codes(self) -> tuple[Tensor, Tensor]:
        """Return the nearest codes: in their own dtype, and in float32.

        The gradient of the second is that of numbers in their range.
        """
        fmt = self.scheme.weight
        latent = (self.codes.float() * self._unit).clamp(fmt.min, fmt.max)
        codes = cast(latent.detach(), fmt)
        return codes, latent + (codes.float() - latent).detach()

    def scale(self) -> Tensor:
        """Return the scales of the weight, float32."""
        return self.start * self.growth.float().exp()

    def quantized_weight(self) -> Tensor:
        """Return the dequantized weight, float32, in the dense layer's shape."""
        return self._dequantized(self.rounded_codes()[1], self.scale())

    def _dequantized(self, rows: Tensor, scale: Tensor) -> Tensor:
        factors, meta = (self._layer.part(name) for name in ("weight_group", "weight_meta"))
        if factors is not None:
            rows = (rows.reshape(*factors.shape, -1) * factors.unsqueeze(-1)).reshape(rows.shape)
        if meta is not None:
            rows = unpack_two_of_four(rows, meta)
        wide = expand_scale(scale, self.scheme.granularity, rows.shape[1])
        return from_rows(rows * wide, self.shape)

    @torch.no_grad()
    def packed(self) -> dict[str, Tensor]:
        """Return the trained tensors of FORMAT.md, by the last part of their names."""
        return self._stored(self.rounded_codes()[0], self.scale())

    def _stored(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        one_byte = self.scheme.weight.codes_per_byte == 1
        return {
            "weight": codes if one_byte else pack_nibbles(codes, self._nibbles),
            "weight_scale": torch.where(_has_codes(codes.float(), self.start), scale, 1.0),
        }

    @property
    def _nibbles(self) -> int:
        """The number of codes along a row that are packed together."""
        return GROUP // 2 if self.scheme.sparsity is not None else GROUP

    def forward(self, x: Tensor) -> Tensor:
        """Return what the packed layer of these codes gives for an input."""
        (codes, rows), scale = self.rounded_codes(), self.scale()
        with torch.no_grad():
            for part, value in self._stored(codes, scale).items():
                held = self._layer.part(part)
                assert held is not None
                held.copy_(value.reshape(held.shape).to(held.dtype))
        weight = self._dequantized(rows, scale)
        y: Tensor = StraightThrough.apply(x, weight, self.bias, self)
        return y

    def multiply(self, x: Tensor) -> Tensor:
        """Return the product of an input and the bias, in the input's dtype."""
        y = self._static_product(x)
        for layer in self._of_tokens:
            per_token = self.timesteps[0].buckets(self.token_edge, len(x)) == 0
            found = self._biased(layer(x.float())).to(x.dtype)
            y = torch.where(per_token.reshape(-1, *[1] * (x.ndim - 1)), found, y)
        return y

    def _static_product(self, x: Tensor) -> Tensor:
        """Return the product of an input with static scales, and the bias."""
        if not self.scheme.buckets:
            y: Tensor = self._layer(x)
            return y
        # The layer has a scale of one and no bias, since the rows' scales differ.
        scale = self.input_scales[self.timesteps[0].buckets(self.edges, len(x))]
        scale = scale.reshape(-1, *[1] * (x.ndim - 1))
        y = self._layer(x.float() / scale) * scale
        return self._biased(y).to(x.dtype)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the dense layer's gradients of input, weight and bias (float32)."""
        raise NotImplementedError

    def _biased(self, y: Tensor) -> Tensor:
        if self.bias is None:
            return y
        return y + (self.bias.reshape(-1, 1, 1) if len(self.shape) == 4 else self.bias)

    def _smoothed(self, x: Tensor) -> Tensor:
        """Return what meets the weight, of an input; of its gradient, that of the input."""
        return smoothed(x, self._layer.part("input_smooth"), is_picture=len(self.shape) == 4)


class TrainedLinear(TrainedLayer):
    """A Linear over (..., K) that computes as PackedLinear does."""

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (..., K), (N, K) and (N,) of (..., N)."""
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            self._smoothed(grad @ weight) if needed[0] else None,
            rows.T @ self._smoothed(x).reshape(-1, x.shape[-1]) if needed[1] else None,
            rows.sum(dim=0, dtype=torch.float32) if needed[2] else None,
        )


class TrainedConv2d(TrainedLayer):
    """A Conv2d over (B, C, H, W) that computes as PackedConv2d does."""

    @property
    def windows(self) -> Windows:
        """The windows of the packed layer."""
        assert isinstance(self._layer, PackedConv2d)
        return self._layer.windows

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (B, C, H, W), (N, C, kh, kw) and (N,) of (B, N, OH, OW)."""
        windows = self.windows
        padded = functional.pad(self._smoothed(x), windows.padding)
        by_x, by_weight, _ = torch.ops.aten.convolution_backward(
            grad, padded, weight, None, windows.stride, (0, 0), windows.dilation,
            False, (0, 0), 1, (*needed[:2], False),
        )  # fmt: skip
        cropped = [-amount for amount in windows.padding]
        return (
            self._smoothed(functional.pad(by_x, cropped)) if needed[0] else None,
            by_weight,
            grad.sum(dim=(0, 2, 3), dtype=torch.float32) if needed[2] else None,
        )


class StraightThrough(torch.autograd.Function):
    """A trained layer as a function of its input, its dequantized weight and its bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: TrainedLayer
    ) -> Tensor:
        """Return the layer's product in autocast's dtype; the weight serves the gradient alone."""
        del bias
        ctx.layer, ctx.input_dtype, dtype = layer, x.dtype, _output_dtype(x)
        ctx.save_for_backward(x.to(dtype), weight.to(dtype))
        # The input is quantized as it is: bfloat16 would take it off by a quarter of INT8's step.
        # On a CPU the kernels run lane by lane, which takes three times as long as PyTorch.
        with use(None if x.is_cuda else Backend.REFERENCE):
            return layer.multiply(x).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the dense layer's gradients."""
        x, weight = ctx.saved_tensors
        needed = tuple(ctx.needs_input_grad[:3])
        by_x, by_weight, by_bias = ctx.layer.gradients(grad.to(x.dtype), x, weight, needed)
        return (
            None if by_x is None else by_x.to(ctx.input_dtype),
            None if by_weight is None else by_weight.float(),
            by_bias,
            None,
        )


def install(model: nn.Module, component: PackedComponent) -> None:
    """Give a dense model the values of a packed one, and trained layers in place of packed ones.

    Args:
        model: of the same class, in float32; changed in place.
        component: the packed model.

    Raises:
        ModelError: a layer or a parameter that the model does not have in this shape.
    """
    timesteps = Timesteps()
    for name, scheme in component.config.layers.items():
        parent, _, child = name.rpartition(".")
        try:
            dense = model.get_submodule(name)
        except AttributeError as error:
            raise ModelError(
                f"{component.path}: {name} is no layer of the 16-bit model; {_CURE}",
                fields=("packed",),
            ) from error
        layer = trained_layer(name, dense, scheme, component.parts(name), timesteps)
        _refuse_other(component, f"{name}.weight", component.records[name].shape, layer.shape)
        setattr(model.get_submodule(parent), child, layer)
    _copy_others(model, component)
    model.add_module(_TIMESTEPS, timesteps)
    model.register_forward_pre_hook(_note_timesteps, with_kwargs=True)


def trained_layer(
    name: str,
    dense: nn.Module,
    scheme: Scheme,
    parts: Mapping[str, Tensor],
    timesteps: Timesteps,
) -> TrainedLayer:
    """Return the layer that computes as the packed one does, over parameters.

    Raises:
        ModelError: neither Linear nor Conv2d, or a Conv2d that cannot be packed.
    """
    if reason := why_not_packed(dense):
        raise ModelError(f"{name}: {reason}; pack the model again")
    if isinstance(dense, nn.Linear):
        return TrainedLinear(dense, scheme, parts, timesteps)
    assert isinstance(dense, nn.Conv2d)
    return TrainedConv2d(dense, scheme, parts, timesteps)


def packed_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of what a trained model's checkpoint holds, but what stays the same.

    Biases, norms and other parameters are float32; the checkpoint's own dtype decides.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, TrainedLayer)}
    for name, layer in layers.items():
        for part, value in layer.packed().items():
            yield f"{name}.{part}", value
    inner = {f"{name}.{part}" for name in layers for part in ("codes", "growth")}
    for name, parameter in model.named_parameters():
        if name not in inner:
            yield name, parameter.detach()


@torch.no_grad()
def _copy_others(model: nn.Module, component: PackedComponent) -> None:
    """Copy what is not packed: biases, which packing corrects, and norms."""
    for name, parameter in model.named_parameters():
        if name not in component.tensors:
            continue
        info = component.tensors[name][1]
        _refuse_other(component, name, info.shape, tuple(parameter.shape))
        stored = torch.frombuffer(component.read_bytes(name), dtype=FLOAT_DTYPES[info.dtype])
        parameter.copy_(stored.reshape(info.shape))


def _refuse_other(
    component: PackedComponent, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Refuse what was packed from a model of other shapes."""
    if found != expected:
        raise ModelError(
            f"{component.path}: {name} is {list(found)}, expected {list(expected)} as in the "
            f"16-bit model; {_CURE}",
            fields=("packed",),
        )


def _codes_of(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return the codes of a packed weight, float32 (N, K), or of 2:4 those kept (N, K / 2)."""
    stored, fmt = parts["weight"], scheme.weight
    if fmt.codes_per_byte == 1:
        return stored.view(fmt.torch_dtype).flatten(1).float()
    return unpack_nibbles(stored, GROUP // 2 if scheme.sparsity else GROUP).float()


def _layer_of(
    dense: nn.Linear | nn.Conv2d, scheme: Scheme, parts: Mapping[str, Tensor]
) -> PackedLayer:
    """Return a packed layer of these tensors; its bias shares the dense layer's memory."""
    layer = pack_module("", replace(scheme, buckets=(), token_below=None), dense, None)
    for part, value in parts.items():
        # Codes and scales are written there in each step.
        layer.fill(part, value.clone() if part in ("weight", "weight_scale") else value)
    if scheme.buckets:
        layer.bias = None
        layer.fill("input_scale", torch.ones((), device=dense.weight.device))
    return layer


def _twin_of_tokens(dense: nn.Linear | nn.Conv2d, layer: PackedLayer) -> PackedLayer:
    """Return a layer of the same memory whose rows have scales of their own, without a bias."""
    twin = pack_module("", replace(layer.scheme, activation=Activation.TOKEN), dense, None)
    for part in PACKED_PARTS:
        value = layer.part(part)
        if value is not None and part != "input_scale":
            twin.fill(part, value.detach())
    twin.bias = None
    return twin


def _output_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype, or the input's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _has_codes(codes: Tensor, scale: Tensor) -> Tensor:
    """Tell of every scale whether any of its codes is not zero."""
    return (codes.reshape(*scale.shape, -1) != 0).any(dim=-1)


def _note_timesteps(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep the timesteps of a call for the layers whose scales depend on them."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    timestep, sample = given.get("timestep"), next(iter(given.values()))
    if timestep is not None:
        timesteps: Any = model.get_submodule(_TIMESTEPS)
        timesteps.values = torch.as_tensor(timestep, device=sample.device).reshape(-1)
