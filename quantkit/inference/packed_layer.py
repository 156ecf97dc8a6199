"""What packed layers share: the buffers of FORMAT.md, quantizing an input, and the multiply."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.spec import PACKED_DTYPES, PACKED_PARTS, Kind, TensorSpec, layer_tensors
from quantkit.inference.buckets import TimestepBuckets, apply_keeping_dtype
from quantkit.inference.operators import operator_for
from quantkit.inference.terms import Term, split
from quantkit.numerics.nibbles import integer_codes, unpack_nibbles
from quantkit.numerics.packing import from_rows, unpack_two_of_four
from quantkit.numerics.scales import dequantize
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.numerics.windows import Windows


class PackedLayer(nn.Module):
    """What PackedLinear and PackedConv2d share: the buffers of FORMAT.md, and the multiply."""

    kind: Kind
    weight: Tensor
    weight_meta: Tensor | None
    weight_group: Tensor | None
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
        """The weight's 8-bit codes as uint8 rows, (N, K) or (N, K / 2)."""
        factors = self._part("weight_group")
        if factors is not None:
            return integer_codes(self._part("weight"), factors).view(torch.uint8)
        if self.scheme.weight.codes_per_byte > 1:
            return unpack_nibbles(self._part("weight")).view(torch.uint8)
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

    @property
    def static_scale(self) -> Tensor:
        """The scale of a static input at the current step: float32, () or (1,)."""
        return self._of_bucket(self._part("input_scale"))

    def _stored(self) -> tuple[Tensor, ...]:
        """Return the weight's codes, and behind them a sparse one's positions, or factors."""
        meta, factors = self._part("weight_meta"), self._part("weight_group")
        if meta is not None:
            return self.row_codes, meta
        if factors is not None:
            return self._part("weight"), factors.view(torch.uint8)
        return (self.row_codes,)

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
        scale = self.static_scale if static else None
        return split(x, scale, smooth, self._shift(taps), scheme.input, scheme.terms)

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
        stored, scheme = self._stored(), self.scheme
        family, how = ("gemm", ()) if windows is None else ("conv", (windows.numbers,))
        sparse = scheme.sparsity is not None
        multiply = operator_for(family, scheme.input.name, scheme.codes.name, sparse=sparse)
        weights = (*stored, self._part("weight_scale"), bias)
        y: Tensor = multiply(*term, *weights, *how, scheme.input.name, scheme.codes.name, dtype)
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        return apply_keeping_dtype(self, super()._apply, fn, recurse=recurse)


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=PACKED_DTYPES[spec.dtype], device=device)
