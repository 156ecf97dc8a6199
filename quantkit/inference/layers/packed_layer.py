"""The base class of packed layers: tensors of FORMAT.md, quantization of inputs, the multiply.

Codes and scales of a weight are frozen parameters, because offloading and parameter counts look at
parameters only.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.spec import PACKED_PARTS, Kind, TensorSpec, layer_tensors
from quantkit.checkpoint.torch_dtypes import PACKED_DTYPES
from quantkit.device.gpu.fixed import Addresses, Product
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.ops.call import prepared
from quantkit.device.ops.table import name_for
from quantkit.device.torch_operators import OPERATORS
from quantkit.errors import InputError
from quantkit.inference.layers.codes import Codes
from quantkit.inference.layers.dense_weight import DenseWeight, refusal
from quantkit.inference.layers.input_codes import Coded, quantize_input
from quantkit.inference.layers.launch_cache import LaunchCache, addresses_of, key_of
from quantkit.inference.layers.timestep_buckets import TimestepBuckets, apply_keeping_dtype
from quantkit.numerics.conv_windows import Windows
from quantkit.numerics.nibbles import integer_codes, unpack_nibbles
from quantkit.numerics.packed_2to4 import from_rows, unpack_two_of_four
from quantkit.numerics.scales import dequantize
from quantkit.numerics.scheme import Activation, Scheme

#: The parts that are parameters; the others, a row or a number each, are buffers.
CODES = ("weight", "weight_meta", "weight_group", "weight_scale")


class PackedLayer(nn.Module):
    """The base of PackedLinear and PackedConv2d: the tensors of FORMAT.md, and the multiply."""

    kind: Kind
    #: the dense class: nn.Linear or nn.Conv2d
    dense_class: type[nn.Linear | nn.Conv2d]
    weight_meta: Codes | None
    weight_group: Codes | None
    weight_scale: Codes
    input_scale: Tensor | None
    input_smooth: Tensor | None
    bias: nn.Parameter | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a dense layer of a dense layer's arguments.

        peft makes an adapter's matrices by calling the type of the layer that it adapts.
        """
        as_dense = not isinstance(args[0], str) if args else bool(kwargs)
        return cls.dense_class(*args, **kwargs) if as_dense else super().__new__(cls)

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        dense: nn.Linear | nn.Conv2d,
        buckets: TimestepBuckets | None,
    ) -> None:
        # Not super(): nn.Linear and nn.Conv2d, which a layer is too, would make a dense weight.
        nn.Module.__init__(self)
        self.name = name
        self.scheme = scheme
        #: the model's compute dtype, to which peft casts its adapters
        self.compute_dtype = dense.weight.dtype
        self.dense_shape = tuple(dense.weight.shape)
        #: output features, and the length of a row: in_features, or kh * kw * C
        self.n, self.k = self.dense_shape[0], prod(self.dense_shape[1:])
        self.direct = LaunchCache()
        # A tuple hides the buckets from the module tree: they belong to the root model.
        self.buckets = (buckets,)
        # First: models ask their first parameter for the dtype to compute in (Wan's embedder).
        bias = dense.bias
        bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)
        specs = layer_tensors(name, scheme, self.kind, self.dense_shape, bias_dtype=None)
        parts = {spec.name.removeprefix(f"{name}."): spec for spec in specs}
        for part in PACKED_PARTS:
            self._own(part)[part] = None
            if part in parts:
                self.fill(part, _empty(parts[part], dense.weight.device))

    def fill(self, part: str, value: Tensor) -> None:
        """Put a tensor of FORMAT.md in its place; a convolution's codes get four axes.

        peft counts the axes of a weight to know what it adapts, and rows of a sparse one have two.

        Args:
            part: of PACKED_PARTS.
            value: as FORMAT.md says; it is kept, not copied.
        """
        if part == "weight" and self.kind == "conv2d" and value.ndim == 2:
            value = value.reshape(len(value), 1, 1, -1)
        self._own(part)[part] = Codes(value) if part in CODES else value

    def _own(self, part: str) -> dict[str, Any]:
        """Return the dict in which nn.Module keeps a tensor of FORMAT.md."""
        return self._parameters if part in CODES else self._buffers

    def part(self, name: str) -> Tensor | None:
        """Return a tensor of FORMAT.md as it is packed; ``weight`` as an attribute is dense."""
        found: Tensor | None = self._own(name)[name]
        return found

    @property
    def codes(self) -> Codes:
        """The weight's codes, as they are packed."""
        found: Codes = self._weight("weight")
        return found

    @property
    def weight(self) -> Tensor:
        """The dense weight, in the compute dtype; see ``DenseWeight``."""
        if torch.compiler.is_compiling():
            return self.dense_weight()
        like = torch.empty(self.dense_shape, dtype=self.compute_dtype, device="meta")
        return DenseWeight.of(self.name, self.dense_weight, like, self.codes.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif value.dtype is self.codes.dtype and value.shape == self.codes.shape:
            self.fill("weight", value.detach())  # load_state_dict(assign=True)
        else:
            raise InputError(refusal(self.name))

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            raise InputError(refusal(self.name))
        super().__delattr__(name)

    @property
    def row_codes(self) -> Tensor:
        """The weight's 8-bit codes as uint8 rows, (N, K) or (N, K / 2)."""
        codes: Tensor = self._weight("weight")
        codes = codes if codes.ndim == 2 else codes.flatten(1)
        factors = self._weight("weight_group")
        if factors is not None:
            return integer_codes(codes, factors).view(torch.uint8)
        if self.scheme.weight.codes_per_byte > 1:
            return unpack_nibbles(codes).view(torch.uint8)
        return codes.view(torch.uint8)

    def dequantized(self) -> Tensor:
        """Return the dense weight in float32, shaped as the dense module's."""
        codes = self.row_codes
        if self.weight_meta is not None:
            codes = unpack_two_of_four(codes, self.weight_meta)
        values = codes.view(self.scheme.weight.torch_dtype)
        rows = dequantize(values, self.weight_scale, self.scheme.granularity)
        return from_rows(rows, self.dense_shape)

    def dense_weight(self) -> Tensor:
        """Return the weight of the dense layer that this one stands for, in its compute dtype."""
        smooth = self._part("input_smooth")
        weight = self.dequantized()
        if smooth is not None:
            weight = weight * smooth.reshape(-1, *[1] * (weight.ndim - 2))
        return weight.to(self.compute_dtype).contiguous()

    def extra_repr(self) -> str:
        """Return the shape and the treatment."""
        s = self.scheme
        sparsity = f", {s.sparsity}" if s.sparsity else ""
        return (
            f"{list(self.dense_shape)}, {s.weight.name} per {s.granularity}{sparsity}, "
            f"activation={s.activation.value}, bias={self.bias is not None}"
        )

    @property
    def activation(self) -> Activation:
        """The quantization of the input at the current step."""
        buckets, scheme = self.buckets[0], self.scheme
        if scheme.token_below is None or buckets is None or not buckets.per_token:
            return scheme.activation
        return Activation.TOKEN

    def _of_bucket(self, table: Tensor) -> Tensor:
        """Return the current bucket's row of (edges + 1, ...), or all of a table without buckets.

        Returns:
            (1, ...), or (...) as it was.
        """
        buckets = self.buckets[0] if self.scheme.buckets else None
        return table if buckets is None else table.index_select(0, buckets.index.to(table.device))

    def _part(self, name: str) -> Any:
        """Return a buffer, or None: a call reads six tensors, and ``getattr`` is slow."""
        return self._buffers[name]

    def _weight(self, name: str) -> Any:
        """Return a part of the weight, or None."""
        return self._parameters[name]

    @property
    def static_scale(self) -> Tensor:
        """The scale of a static input at the current step: float32, () or (1,)."""
        return self._of_bucket(self._part("input_scale"))

    def stored(self) -> tuple[Tensor, ...]:
        """Return the weight's codes, then the positions of a sparse one, or factors."""
        meta, factors = self._weight("weight_meta"), self._weight("weight_group")
        if meta is not None:
            return self.row_codes, meta
        if factors is not None:
            return self._weight("weight").flatten(1), factors.view(torch.uint8)
        return (self.row_codes,)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        bias = self._parameters["bias"]
        return bias if bias is None or bias.dtype is dtype else bias.to(dtype)

    def _quantize(self, x: Tensor, taps: int = 1) -> Coded:
        """Return the codes of inputs (M, taps * C), and their scale."""
        smooth = self._part("input_smooth")
        if smooth is not None and taps > 1:
            smooth = smooth.repeat(taps)
        static = self.activation is Activation.STATIC
        return quantize_input(x, self.static_scale if static else None, smooth, self.scheme.input)

    def _multiply(self, coded: Coded, dtype: torch.dtype, windows: Windows | None = None) -> Tensor:
        """Return the product and the bias in ``dtype``.

        Args:
            coded: the input, (M, K); with windows (B, H, W, C).
            dtype: of the result.
            windows: of a convolution.

        Returns:
            (M, N); with windows (B, OH, OW, N).
        """
        bias = self._bias(dtype)
        # A bias that was cast is another one at each call.
        own = bias is self._parameters["bias"]
        key = key_of(coded[0], coded[1].shape, dtype, windows) if own else None
        if key is not None and (direct := self.direct.find(self, key)) is not None:
            found: Tensor = direct(*coded)
            return found
        name, options = self._operation(dtype, windows)
        weights = (*self.stored(), self._weight("weight_scale"), bias)
        y: Tensor = OPERATORS[name](*coded, *weights, *options)
        if key is not None:
            call = partial(self._product_call, coded, dtype, windows)
            self.direct.learn(self, coded[0], key, call)
        return y

    def _product_call(
        self, coded: Coded, dtype: torch.dtype, windows: Windows | None = None
    ) -> Product | None:
        """Return the launch that ``_multiply`` runs for an input; None where it is no kernel."""
        call, weights = self._prepared_product(coded, dtype, windows)
        return None if call is None else Product(call, weights)

    def _prepared_product(
        self, coded: Coded, dtype: torch.dtype, windows: Windows | None = None
    ) -> tuple[Call | None, Addresses]:
        """Return the prepared call of a product, and the addresses of its weights."""
        name, options = self._operation(dtype, windows)
        weights = (*self.stored(), self._weight("weight_scale"), self._parameters["bias"])
        return prepared(name, (*coded, *weights), options), addresses_of(weights)

    def _operation(
        self, dtype: torch.dtype, windows: Windows | None
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the name of the product's operation, and its options."""
        scheme = self.scheme
        kinds = (scheme.input.name, scheme.codes.name)
        family, how = ("gemm", ()) if windows is None else ("conv", (windows.numbers,))
        name = name_for(family, *kinds, sparse=scheme.sparsity is not None)
        return name, (*how, *kinds, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002  torch's signature
        probe = self.codes.new_empty(0, dtype=self.compute_dtype)
        self.compute_dtype = _cast(probe, fn).dtype
        cast = partial(_cast, fn=fn)
        apply_keeping_dtype(self, super()._apply, cast, recurse=recurse, but=("bias",))
        for part in CODES:
            # What leaves the meta device is a new parameter, and a plain one.
            moved = self._weight(part)
            if moved is not None and type(moved) is not Codes:
                self.fill(part, moved.detach())
        # A bias of another dtype may come to lie where the old one lay.
        self.direct = LaunchCache()
        return self


def bare(layer: PackedLayer) -> nn.Module:
    """Return a module of a layer's tensors only; its ``weight`` is the codes.

    Libraries that load or move tensors look them up by the names that the layer's have in files.
    """
    module = nn.Module()
    module._parameters, module._buffers = layer._parameters, layer._buffers  # noqa: SLF001  shared
    return module


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=PACKED_DTYPES[spec.dtype], device=device)


def _cast(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``fn``'s tensor, but never in 8 bit, which diffusers' layerwise casting asks for."""
    moved = fn(tensor)
    as_ever = moved.dtype is tensor.dtype or moved.dtype.itemsize > 1
    return moved if as_ever else tensor.to(moved.device)
