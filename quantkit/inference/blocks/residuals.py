"""Residual sums, with or without a gate, fused into the last layer's kernel.

diffusers' blocks write a product, read it again to add it to the residual, and write the sum. On a
GPU, outside of torch.compile, the kernel of the branch's last layer reads the residual and writes
the sum, rounded once. Attention or a network calls the layer and knows nothing of that: the layer
gets another ``forward`` for as long as they run. With hooks, offloading, adapters or a gradient,
the sum is computed as usual.
"""

from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import name_for
from quantkit.inference.blocks.norm_codes import Branch
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.inference.layers.modules import PackedConv2d, ReplacedForward, is_watched
from quantkit.inference.layers.prompts import is_plain
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.scheme import Activation


def adds(layer: Any, x: Tensor, gate: Tensor | None = None) -> bool:
    """Tell whether a layer's kernel adds its product to x, (..., N) or a picture (B, N, H, W)."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return False
    is_conv = type(layer) is PackedConv2d
    if is_watched(layer) if is_conv else not is_plain(layer):
        return False
    scheme = layer.scheme
    if scheme.activation is Activation.NONE:
        return False
    if x.dtype not in IO_DTYPES.values() or isinstance(scheme.granularity, PerGroup):
        return False
    if gate is not None and (gate.dtype is not x.dtype or gate.ndim != 2):
        return False
    kinds, sparse = (scheme.input.name, scheme.codes.name), scheme.sparsity is not None
    name = name_for("conv_residual" if is_conv else "gemm_residual", *kinds, sparse=sparse)
    found: bool = has_kernel(name, str(x.device), layer.k)
    return found


class ResidualSum(ReplacedForward):
    """``x + gate * y``, where attention or a network computes y inside a ``with`` block."""

    def __init__(self, layer: Any, x: Tensor, gate: Tensor | None = None) -> None:
        """Prepare a sum.

        Args:
            layer: y is its output; None: nobody knows what y is.
            x: (B, T, N).
            gate: (B, N), or None.
        """
        self.x, self.gate = x, gate
        self._layer: Any = layer if layer is not None and adds(layer, x, gate) else None
        self._thread = 0 if self._layer is None else get_ident()
        self._added = False

    def __enter__(self) -> "ResidualSum":  # noqa: PYI034  Self is of Python 3.11
        """Let the layer add."""
        if self._layer is not None:
            vars(self._layer)["forward"] = self
        return self

    def __exit__(self, *failure: object) -> None:
        """Let the layer be as it was."""
        if self._layer is not None and vars(self._layer).get("forward") is self:
            del vars(self._layer)["forward"]

    def __call__(self, input: Tensor | QuantizedInput) -> Tensor:  # noqa: A002  as PackedLinear
        """Return the sum, in place of the layer's ``forward``."""
        layer, x = self._layer, self.x
        fits = input.dtype is x.dtype and (*input.shape[:-1], layer.n) == x.shape
        # Another thread that calls the model adds up by itself.
        if self._added or not fits or get_ident() != self._thread:
            y: Tensor = type(layer).forward(layer, input)
        else:
            self._added = True
            y = layer.add_to(input, x, self.gate)
        return y

    def parts(self, y: Tensor) -> tuple[Tensor, Branch | None]:
        """Return the sum, or x and the summand that is left, once y is computed."""
        return (y, None) if self._added else (self.x, Branch(y, self.gate))

    def total(self, y: Tensor) -> Tensor:
        """Return the sum once y is computed."""
        return y if self._added else Branch(y, self.gate).added_to(self.x)
