"""Packed layers: Linear and Conv2d over FP8 codes, called like the dense layers they replace.

The compute dtype is the input's. Codes and scales never change dtype, whatever ``to`` asks for.
Convolutions read channels last, in the order of their rows (kh, kw, C). With a static scale pixels
are quantized once; else windows are unfolded into rows with a scale each.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit.checkpoint.spec import PACKED_PARTS, Kind, TensorSpec, layer_tensors
from quantkit.errors import CheckpointError, ShapeError
from quantkit.inference.buckets import TimestepBuckets, apply_keeping_dtype
from quantkit.inference.conv_operators import conv, conv_sparse
from quantkit.inference.operators import gemm, gemm_sparse
from quantkit.inference.terms import Term, split
from quantkit.numerics.packing import from_rows, unpack_two_of_four
from quantkit.numerics.scales import dequantize
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.windows import Windows

_DTYPES = {
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class PackedLayer(nn.Module):
    """What PackedLinear and PackedConv2d share: the buffers of FORMAT.md, and the multiply."""

    kind: Kind
    weight: Tensor
    weight_meta: Tensor | None
    weight_scale: Tensor
    input_scale: Tensor | None
    input_smooth: Tensor | None
    input_shift: Tensor | None
    output_shift: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        dense: nn.Linear | nn.Conv2d,
        buckets: TimestepBuckets | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.scheme = scheme
        self.dense_shape = tuple(dense.weight.shape)
        #: output features, and the length of a row: in_features, or kh * kw * C
        self.n, self.k = self.dense_shape[0], prod(self.dense_shape[1:])
        # A tuple hides the buckets from the module tree: they belong to the root model.
        self.buckets = (buckets,)
        specs = layer_tensors(name, scheme, self.kind, self.dense_shape, bias_dtype=None)
        parts = {spec.name.removeprefix(f"{name}."): spec for spec in specs}
        for part in PACKED_PARTS:
            buffer = _empty(parts[part], dense.weight.device) if part in parts else None
            self.register_buffer(part, buffer)
        bias = dense.bias
        bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def row_codes(self) -> Tensor:
        """The weight's codes as uint8 rows, (N, K) or (N, K / 2)."""
        codes: Tensor = self._part("weight").view(torch.uint8)
        return codes if codes.ndim == 2 else codes.flatten(1)

    def dequantized(self) -> Tensor:
        """Return the dense weight in float32, shaped as the dense module's."""
        codes = self.row_codes
        if self.weight_meta is not None:
            codes = unpack_two_of_four(codes, self.weight_meta)
        values = codes.view(self.scheme.weight.torch_dtype)
        rows = dequantize(values, self.weight_scale, self.scheme.granularity)
        return from_rows(rows, self.dense_shape)

    def extra_repr(self) -> str:
        """Return the shape and the treatment."""
        s = self.scheme
        sparsity = f", {s.sparsity}" if s.sparsity else ""
        return (
            f"{list(self.dense_shape)}, {s.weight.name} per {s.granularity}{sparsity}, "
            f"activation={s.activation.value}, bias={self.bias is not None}"
        )

    def _of_bucket(self, table: Tensor) -> Tensor:
        """Return the current bucket's row of (edges + 1, ...), or all of a table without buckets.

        Returns:
            (1, ...), or (...) as it was.
        """
        buckets = self.buckets[0]
        return table if buckets is None else table.index_select(0, buckets.index.to(table.device))

    def _part(self, name: str) -> Any:
        """Return a buffer, or None: a call reads six, which ``__getattr__`` finds slowly."""
        return self._buffers[name]

    def _shift(self, taps: int = 1) -> Tensor | None:
        """Return what is taken from the columns of rows (M, taps * C): (taps * C,), or None."""
        table = self._part("input_shift")
        if table is None:
            return None
        shift = self._of_bucket(table).reshape(-1)
        return shift if taps == 1 else shift.repeat(taps)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias, with what the shift of the input takes from the output put back."""
        bias, table = self._parameters["bias"], self._part("output_shift")
        if table is None:
            return bias if bias is None or bias.dtype is dtype else bias.to(dtype)
        shift = self._of_bucket(table).reshape(-1)
        return (shift if bias is None else shift + bias.float()).to(dtype)

    def _terms(self, x: Tensor, taps: int = 1) -> list[Term]:
        """Return what inputs (M, taps * C) become: FP8 values that add up to them."""
        scheme, smooth = self.scheme, self._part("input_smooth")
        if smooth is not None and taps > 1:
            smooth = smooth.repeat(taps)
        static = scheme.activation is Activation.STATIC
        scale = self._of_bucket(self._part("input_scale")) if static else None
        return split(x, scale, smooth, self._shift(taps), scheme.weight, scheme.terms)

    def _multiply(
        self, terms: list[Term], dtype: torch.dtype, windows: Windows | None = None
    ) -> Tensor:
        """Return the sum of the terms' products in ``dtype``.

        Args:
            terms: of the input, (M, K); with windows (B, H, W, C).
            windows: of a convolution.

        Returns:
            (M, N); with windows (B, OH, OW, N).
        """
        bias = self._bias(dtype)
        y = self._product(terms[0], bias, dtype, windows)
        for term in terms[1:]:
            y = y + self._product(term, None, dtype, windows)
        return y

    def _product(
        self, term: Term, bias: Tensor | None, dtype: torch.dtype, windows: Windows | None
    ) -> Tensor:
        meta, scale = self._part("weight_meta"), self._part("weight_scale")
        sparse = meta is not None
        codes = (self.row_codes, meta) if sparse else (self.row_codes,)
        weights = (*codes, scale, bias)
        y: Tensor
        if windows is None:
            y = (gemm_sparse if sparse else gemm)(*term, *weights, self.scheme.weight.name, dtype)
        else:
            how = (windows.numbers, self.scheme.weight.name, dtype)
            y = (conv_sparse if sparse else conv)(*term, *weights, *how)
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        return apply_keeping_dtype(self, super()._apply, fn, recurse=recurse)


class PackedLinear(PackedLayer):
    """A Linear layer over codes.

    Called with (..., K) in float16, bfloat16 or float32; returns (..., N) in the same dtype.
    """

    kind: Kind = "linear"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        if x.shape[-1] != self.k:
            raise ShapeError(f"{self.name}: input {list(x.shape)}, wanted (..., {self.k})")
        if self.scheme.activation is Activation.NONE:
            weight = self.dequantized().to(x.dtype)
            return functional.linear(_smoothed(x, self.input_smooth), weight, _as(self.bias, x))
        rows = x.reshape(-1, self.k).contiguous()
        return self._multiply(self._terms(rows), x.dtype).reshape(*x.shape[:-1], self.n)


class PackedConv2d(PackedLayer):
    """A Conv2d layer over codes, with zero padding and one group.

    Called with (B, C, H, W) or (C, H, W) in float16, bfloat16 or float32; returns (B, N, OH, OW) in
    the same dtype and layout in memory. Kernels read and write channels last; what stands between
    convolutions would copy what is not laid out as its model is, sums and concatenations slowly.
    """

    kind: Kind = "conv2d"

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        dense: nn.Conv2d,
        buckets: TimestepBuckets | None,
    ) -> None:
        if dense.padding_mode != "zeros" or dense.groups != 1:
            raise CheckpointError(
                f"{name}: Conv2d with padding_mode {dense.padding_mode!r} and groups "
                f"{dense.groups}, wanted 'zeros' and 1; keep this layer in 16 bit"
            )
        super().__init__(name, scheme, dense, buckets)
        padding = dense._reversed_padding_repeated_twice  # noqa: SLF001  the only place that resolves "same"
        self.windows = Windows.of((*dense.kernel_size, *dense.stride, *dense.dilation, *padding))

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of ``x``."""
        channels = self.dense_shape[1]
        if x.ndim not in (3, 4) or x.shape[-3] != channels:
            raise ShapeError(f"{self.name}: input {list(x.shape)}, wanted (B, {channels}, H, W)")
        if x.ndim == 3:
            return self._batched_forward(x.unsqueeze(0)).squeeze(0)
        return self._batched_forward(x)

    def _batched_forward(self, x: Tensor) -> Tensor:
        if self.scheme.activation is Activation.NONE:
            return self._dequantized_forward(x)
        pixels = x.permute(0, 2, 3, 1)
        if self.scheme.activation is Activation.STATIC:
            y = self._convolve(pixels, x.dtype)
        else:
            windows = self.windows.unfold(pixels.contiguous())
            terms = self._terms(windows.reshape(-1, self.k), self.windows.taps)
            y = self._multiply(terms, x.dtype).reshape(*windows.shape[:3], self.n)
        y = y.permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y

    def _convolve(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (B, OH, OW, N) of (B, H, W, C), each pixel quantized once."""
        windows = self.windows
        if self.input_shift is not None:
            # What stands outside of the picture is zero before the shift, and not the mean.
            pixels, windows = windows.pad(pixels), windows.without_padding()
        pixels = pixels.contiguous()
        terms = [
            (codes.reshape(pixels.shape), scale)
            for codes, scale in self._terms(pixels.reshape(-1, pixels.shape[-1]))
        ]
        return self._multiply(terms, dtype, windows)

    def _dequantized_forward(self, x: Tensor) -> Tensor:
        smooth = None if self.input_smooth is None else self.input_smooth.reshape(-1, 1, 1)
        windows = self.windows
        padded = functional.pad(_smoothed(x, smooth), windows.padding)
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
    if isinstance(dense, nn.Linear):
        return PackedLinear(name, scheme, dense, buckets)
    if isinstance(dense, nn.Conv2d):
        return PackedConv2d(name, scheme, dense, buckets)
    raise CheckpointError(
        f"{name}: the model has a {type(dense).__name__} here, wanted Linear or Conv2d; "
        "pack the model again"
    )


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device=device)


def _smoothed(x: Tensor, smooth: Tensor | None) -> Tensor:
    return x if smooth is None else (x.float() * smooth).to(x.dtype)


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)
