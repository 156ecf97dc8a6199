"""Outputs of attention on codes: 16 bit, or codes for the output projection.

Where the output projection has a static input scale, the kernel of attention quantizes its output
itself, and 16 bit are not written and read again. The codes are those that quantizing would make of
the 16 bit. Where the layer has hooks, or torch.compile traces it, 16 bit are written as usual.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.device.ops.attention.attention_codes import Y_FORMAT
from quantkit.device.ops.table import attention_for, name_for
from quantkit.device.torch_operators import OPERATORS, operator_for
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.inference.layers.prompts import is_plain
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.numerics.formats import E4M3FN


class HeadProduct(NamedTuple):
    """A pending attention product of codes of heads."""

    #: of attention's operation
    operands: tuple[Tensor | None, ...]
    #: keys, heads, columns of a head, format of queries and keys, dtype of the result
    options: tuple[Any, ...]
    #: of probabilities and values: e4m3fn; None: float16
    pv: str | None = E4M3FN.name

    def of_pictures(self, heads: int) -> "HeadProduct":
        """Return the same of pictures with so many heads."""
        keys, _, *others = self.options
        return self._replace(options=(keys, heads, *others))

    def wide(self) -> Tensor:
        """Return the result in 16 bit, (B, T, H, D)."""
        y: Tensor = OPERATORS[attention_for(self._qk_format, self.pv)](
            *self.operands, *self.options
        )
        return y

    def read_by(self, layer: Any) -> Tensor | QuantizedInput:
        """Return the result, (B, T, H * D), as codes if its only reader takes them.

        Args:
            layer: None: nobody knows what reads it.
        """
        if not self._ends_in_codes_of(layer):
            return self.wide().flatten(2)
        attend = operator_for("attention_codes", self._qk_format)
        smooth, scale = layer.smooth_and_scale
        codes: Tensor = attend(*self.operands, smooth, scale, *self.options)
        shape, dtype = codes.flatten(2).shape, self.options[4]
        return QuantizedInput(codes.reshape(-1, layer.k), scale, shape, dtype)

    @property
    def _qk_format(self) -> str:
        name: str = self.options[3]
        return name

    def _ends_in_codes_of(self, layer: Any) -> bool:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.pv is None:
            return False
        _, heads, columns, *_ = self.options
        if not _reads_codes(layer) or layer.k != heads * columns:
            return False
        q = self.operands[0]
        assert q is not None
        name = name_for("attention_codes", self._qk_format)
        found: bool = has_kernel(name, str(q.device), q.shape[2])
        return found


def _reads_codes(layer: Any) -> bool:
    """Tell whether a layer only multiplies codes that attention can write."""
    return is_plain(layer) and layer.takes_parts and layer.scheme.input.name == Y_FORMAT
