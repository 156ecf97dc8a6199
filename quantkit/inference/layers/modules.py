"""Packed layers: Linear and Conv2d over FP8 codes, called like the dense layers they replace.

The compute dtype is the input's. Codes and scales never change dtype, whatever ``to`` asks for.
Convolutions read channels last, in the order of their rows (kh, kw, C). With a static scale pixels
are quantized once; else windows are unfolded into rows with a scale each.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from quantkit.checkpoint.spec import Kind
from quantkit.device.gpu.fixed import TwoKernels
from quantkit.device.ops.call import prepared
from quantkit.device.ops.table import name_for
from quantkit.device.torch_operators import OPERATORS, operator_for
from quantkit.errors import CheckpointError, ShapeError
from quantkit.inference.layers.head_scales import FoldedScales
from quantkit.inference.layers.input_codes import Coded, quantize_windows
from quantkit.inference.layers.launch_cache import addresses_of, key_of
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.inference.layers.timestep_buckets import TimestepBuckets
from quantkit.inference.layers.weight_only_layers import are_few, why_dequantized
from quantkit.inference.pictures.content import Product, Stored, whole
from quantkit.inference.pictures.deferred import convolved
from quantkit.models.skeleton import why_not_packed
from quantkit.numerics.conv_windows import Windows
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.scheme import Activation, Scheme


class PackedLinear(PackedLayer, nn.Linear):  # type: ignore[misc, override]  # weight is read alone
    """A Linear layer over codes; an instance of nn.Linear for adapters.

    Called with (..., K) in float16, bfloat16 or float32; returns (..., N) in the same dtype. A norm
    before it may give its codes in place of the 16 bit.
    """

    kind: Kind = "linear"
    dense_class = nn.Linear

    def __init__(
        self, name: str, scheme: Scheme, dense: nn.Linear, buckets: TimestepBuckets | None
    ) -> None:
        super().__init__(name, scheme, dense, buckets)
        # Pipelines ask embedding layers for it (SDXL's add_embedding), and so do adapters.
        self.in_features, self.out_features = self.k, self.n
        alone = scheme.activation is Activation.NONE
        self._takes_few = alone and not why_dequantized(self.dense_shape, scheme)

    def __call__(self, input: Tensor | QuantizedInput, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  as forward
        """Return ``forward``'s result, by a cached launch where there is one and no hooks.

        What nn.Module asks before it calls ``forward`` takes the host longer than a launch.
        """
        key = key_of(input) if not (args or kwargs) and _is_alone(self) else None
        if key is not None and (direct := self.direct.find(self, key)) is not None:
            return direct(input)
        return super().__call__(input, *args, **kwargs)

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:  # noqa: A002  some models name it, as torch does
        """Return ``input @ weight.T + bias``."""
        x = input
        key = key_of(x)
        if key is not None and (direct := self.direct.find(self, key)) is not None:
            found: Tensor = direct(x)
            return found
        if x.shape[-1] != self.k:
            raise ShapeError(f"{self.name}: input {list(x.shape)}, expected (..., {self.k})")
        if isinstance(x, QuantizedInput):
            return self._multiply(x[:2], x.dtype).reshape(*x.shape[:-1], self.n)
        if self.scheme.activation is Activation.NONE:
            return self._weight_only_forward(smoothed(x, self.input_smooth))
        rows = x.reshape(-1, self.k).contiguous()
        y = self._multiply(self._quantize(rows), x.dtype).reshape(*x.shape[:-1], self.n)
        if key is not None:
            self.direct.learn(self, x, key, partial(self._two_kernels, x))
        return y

    def _two_kernels(self, x: Tensor) -> TwoKernels | None:
        """Return the two kernel launches of ``forward``; None where it does anything else."""
        scheme, bias = self.scheme, self._parameters["bias"]
        cast = bias is not None and bias.dtype is not x.dtype
        if self.buckets[0] is not None or cast:
            return None
        kind, rows = scheme.input.name, x.reshape(-1, self.k)
        scale = self._part("input_scale") if self.takes_parts else None
        given = (self._part("input_smooth"), *(() if scale is None else (scale,)))
        family = "quantize_token" if scale is None else "quantize_static"
        quantize = prepared(name_for(family, kind), (rows, *given), (kind,))
        # Of what is made in between, shapes and dtypes alone are looked at.
        codes = torch.empty_like(rows, dtype=torch.uint8)
        made = rows.new_empty(len(rows), dtype=torch.float32) if scale is None else scale
        multiply, weights = self._prepared_product((codes, made), x.dtype)
        if quantize is None or multiply is None:
            return None
        multiply = multiply.shaped((*x.shape[:-1], self.n))
        return TwoKernels(quantize, addresses_of(given), multiply, weights)

    def _weight_only_forward(self, x: Tensor) -> Tensor:
        bias = _as(self.bias, x)
        rows = x.reshape(-1, self.k)
        if not self._takes_few or not are_few(rows.shape[0], x.dtype):
            return functional.linear(x, self.dequantized().to(x.dtype), bias)
        factors, codes = self._weight("weight_group"), self._weight("weight").view(torch.uint8)
        factors = None if factors is None else factors.view(torch.uint8)
        scale, name = self._weight("weight_scale"), self.scheme.weight.name
        y: Tensor = OPERATORS["gemm_w16"](rows, codes, factors, scale, bias, name)
        return y.reshape(*x.shape[:-1], self.n)

    @property
    def quantizes_input(self) -> bool:
        """True when inputs become codes."""
        return self.scheme.activation is not Activation.NONE

    def _coded(self, x: Tensor | QuantizedInput) -> Coded:
        """Return the codes of an input (..., K), and their scale."""
        if isinstance(x, QuantizedInput):
            return x[:2]
        return self._quantize(x.reshape(-1, self.k).contiguous())

    @property
    def takes_parts(self) -> bool:
        """True when each column's codes depend on that column alone: one static scale now."""
        return self.activation is Activation.STATIC

    @property
    def smooth_and_scale(self) -> tuple[Tensor | None, Tensor]:
        """Smoothing and scale of a static input: float32 (K,), and () or (1,)."""
        return self._part("input_smooth"), self.static_scale

    @property
    def writes_codes(self) -> bool:
        """True when a product may end in codes: with a scale for each output."""
        return self.quantizes_input and not isinstance(self.scheme.granularity, PerGroup)

    def head_codes(
        self,
        x: Tensor | QuantizedInput,
        family: str,
        heads: int,
        mean: Tensor | None,
        factor: Tensor,
    ) -> Tensor:
        """Return e4m3fn codes of ``(forward(x) - mean) * factor`` by head; see the operations.

        Args:
            x: (B, T, K), of a layer that ``writes_codes``.
            family: project_codes or project_values.
            heads: H, of N / H outputs.
            mean: float32 (N,), or None.
            factor: float32 (N,).
        """
        codes, x_scale = self._coded(x)
        scheme = self.scheme
        project = operator_for(
            family, scheme.input.name, scheme.codes.name, sparse=scheme.sparsity is not None
        )
        y: Tensor = project(
            codes, x_scale, *self.stored(), *self.folded(mean, factor),
            x.shape[1], heads, scheme.input.name, scheme.codes.name,
        )  # fmt: skip
        return y

    def folded(self, mean: Tensor | None, factor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scales and the bias, float32 (N,), of ``(forward(x) - mean) * factor``.

        Args:
            mean: float32 (N,), or None.
            factor: float32 (N,).
        """
        bias = self._bias(torch.float32)
        offset = bias if mean is None else -mean if bias is None else bias - mean
        scale = self._weight("weight_scale") * factor
        return scale, None if offset is None else offset * factor

    def codes_of_heads(
        self,
        x: Tensor | QuantizedInput,
        others: Sequence["PackedLinear"],
        folds: FoldedScales,
        heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes of queries, keys and values of one input; see ``project_heads``.

        Args:
            x: (B, T, K), of layers that quantize it with one scale.
            others: of keys and of values; this one is of queries.
            folds: scales and biases of the three, with factors and means of heads.
            heads: H, of N / H outputs.
        """
        codes, x_scale = self._coded(x)
        scheme = self.scheme
        kinds = (scheme.input.name, scheme.codes.name)
        weights = (part for layer in (self, *others) for part in layer.stored())
        project = operator_for("project_heads", *kinds, sparse=scheme.sparsity is not None)
        made: tuple[Tensor, Tensor, Tensor] = project(
            codes, x_scale, *weights, folds.scale, folds.bias, x.shape[1], heads, *kinds
        )
        return made


class PackedConv2d(PackedLayer, nn.Conv2d):  # type: ignore[misc, override]  # as above
    """A Conv2d layer over codes, with zero padding and one group; an instance of nn.Conv2d.

    Called with (B, C, H, W) or (C, H, W) in float16, bfloat16 or float32; returns (B, N, OH, OW) in
    the same dtype and layout in memory. Kernels read and write channels last; what stands between
    convolutions would copy what is not laid out as its model is, sums and concatenations slowly.
    """

    kind: Kind = "conv2d"
    dense_class = nn.Conv2d
    #: outside of autograd, results may be ``Deferred``
    defers = False

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        dense: nn.Conv2d,
        buckets: TimestepBuckets | None,
    ) -> None:
        super().__init__(name, scheme, dense, buckets)
        for attribute in nn.Conv2d.__constants__:
            setattr(self, attribute, getattr(dense, attribute))
        padding = dense._reversed_padding_repeated_twice  # noqa: SLF001  the only place that resolves "same"
        self.windows = Windows.of((*dense.kernel_size, *dense.stride, *dense.dilation, *padding))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  some models name it, as torch does
        """Return the convolution of ``input``."""
        x = input
        channels = self.dense_shape[1]
        if x.ndim not in (3, 4) or x.shape[-3] != channels:
            raise ShapeError(f"{self.name}: input {list(x.shape)}, expected (B, {channels}, H, W)")
        if x.ndim == 3:
            return self._batched_forward(x.unsqueeze(0)).squeeze(0)
        return self._batched_forward(x)

    def _batched_forward(self, x: Tensor) -> Tensor:
        if self.scheme.activation is Activation.NONE:
            return self._dequantized_forward(x)
        if self.activation is Activation.TOKEN:
            if self._may_defer():
                return convolved(self, x)
            y = self._by_bands(x)
        else:
            y = self._convolve(x.permute(0, 2, 3, 1), x.dtype).permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y

    def _may_defer(self) -> bool:
        """Tell whether nobody looks at the result but the code that comes next."""
        plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return self.defers and plain and not is_watched(self)

    def _by_bands(self, x: Tensor) -> Tensor:
        product = Product(Stored(x), self)
        if torch.compiler.is_compiling():
            # The compiler fuses what unfolds with what quantizes.
            return product.lines(0, product.shape[1]).permute(0, 3, 1, 2)
        return whole(product)

    def multiply_windows(self, pixels: Tensor, windows: Windows) -> Tensor:
        """Return products (B, OH, OW, N) of windows of (B, H, W, C), each with a scale."""
        smooth, fmt = self._part("input_smooth"), self.scheme.input
        coded = quantize_windows(pixels, smooth, windows, fmt)
        outputs = windows.outputs(*pixels.shape[1:3])
        y = self._multiply(coded, pixels.dtype)
        return y.reshape(len(pixels), *outputs, self.n)

    def _convolve(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (B, OH, OW, N) of (B, H, W, C), each pixel quantized once."""
        codes, scale = self._quantize(pixels.reshape(-1, pixels.shape[-1]).contiguous())
        return self._multiply((codes.reshape(pixels.shape), scale), dtype, self.windows)

    def _dequantized_forward(self, x: Tensor) -> Tensor:
        windows = self.windows
        wide = smoothed(x, self.input_smooth, is_picture=True)
        padded = functional.pad(wide, windows.padding)
        weight = self.dequantized().to(x.dtype)
        steps = (windows.stride, 0, windows.dilation)
        return functional.conv2d(padded, weight, _as(self.bias, x), *steps)


def pack_module(
    name: str, scheme: Scheme, dense: nn.Module, buckets: TimestepBuckets | None
) -> PackedLayer:
    """Return the empty packed layer that replaces ``dense``, on the same device.

    Raises:
        CheckpointError: neither Linear nor Conv2d, or a Conv2d that is not supported.
    """
    if reason := why_not_packed(dense):
        raise CheckpointError(f"{name}: {reason}; pack the model again")
    if isinstance(dense, nn.Linear):
        return PackedLinear(name, scheme, dense, buckets)
    assert isinstance(dense, nn.Conv2d)
    return PackedConv2d(name, scheme, dense, buckets)


def is_watched(layer: nn.Module) -> bool:
    """Tell whether a layer's calls are observed or changed: by hooks, or by offloading."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks  # noqa: SLF001
    own = layer.__dict__
    return bool(hooks) or "forward" in own


def _is_alone(layer: nn.Module) -> bool:
    """Tell whether a call of the layer runs its class's ``forward`` and nothing else."""
    own = layer.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or "forward" in own
        or layer._compiled_call_impl  # noqa: SLF001  compile() tells nobody else
    )


def smoothed(x: Tensor, smooth: Tensor | None, *, is_picture: bool = False) -> Tensor:
    """Return an input times its smoothing, in the input's dtype.

    Args:
        x: (..., K), or a picture (B, C, H, W).
        smooth: float32 (K,) or (C,), or None for ones.
        is_picture: channels are the third axis from the end.
    """
    if smooth is None:
        return x
    return (x.float() * (smooth.reshape(-1, 1, 1) if is_picture else smooth)).to(x.dtype)


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)
