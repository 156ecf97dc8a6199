"""Norms fused with quantization, computed once for all layers that read them.

Layers that read one norm have one scale: it comes from the same numbers. So the norm's codes are
made once for queries, keys and values. On a GPU one operation computes norm and codes, and 16 bit
between them are never written.

Where a layer has hooks or an adapter, the norm passes its 16 bit to all of them. So it does where
torch.compile quantizes by itself (``compiler_fuses``): its own kernel of norm and codes was the
fastest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.device.archs import Toolchain
from quantkit.device.choosing import supposed
from quantkit.device.ops.table import name_for
from quantkit.device.torch_operators import operator_for
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.inference.layers.modules import PackedLinear, is_watched
from quantkit.inference.layers.quantized_input import QuantizedInput

#: Parts that belong to a layer's input.
_OF_INPUT = ("input_scale", "input_smooth")
#: Columns come in runs of so many.
_ALIGNED = 8


class Modulation(NamedTuple):
    """The modulation of AdaLN after a norm: ``norm(x) * (1 + scale) + shift``, each (B, K)."""

    scale: Tensor
    shift: Tensor


class Branch(NamedTuple):
    """A summand before a norm: ``gate * x``, x as the norm's input, gate (B, K) or None."""

    x: Tensor
    gate: Tensor | None = None

    def added_to(self, x: Tensor) -> Tensor:
        """Return the sum as diffusers' blocks compute it."""
        return x + (self.x if self.gate is None else self.gate.unsqueeze(1) * self.x)

    def is_like(self, x: Tensor) -> bool:
        """Tell whether all operands have x's dtype and shape, so that the sum needs no widening."""
        gate = self.gate
        plain = gate is None or (gate.dtype is x.dtype and gate.shape[1:] == x.shape[2:])
        return plain and self.x.dtype is x.dtype and self.x.shape == x.shape


def read_alike(layers: Sequence[Any]) -> bool:
    """Tell whether layers read an input as the same codes: packed, of one scale."""
    first = layers[0]
    if not all(isinstance(layer, PackedLinear) and layer.quantizes_input for layer in layers):
        return False
    return all(
        layer.scheme.input is first.scheme.input
        and layer.scheme.activation is first.scheme.activation
        and layer.scheme.buckets == first.scheme.buckets
        and all(_same(getattr(layer, part), getattr(first, part)) for part in _OF_INPUT)
        for layer in layers[1:]
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def sums_pay() -> bool:
    """Tell whether fusing the sum into the norm pays: where memory traffic is the limit.

    On an H200 SDXL's step takes 1.3 ms longer with it, so NVIDIA's cards add first.
    """
    arch = supposed()
    return torch.version.hip is not None if arch is None else arch.toolchain is Toolchain.CLANG


def layer_normed(
    norm: Any,
    readers: Sequence[Any],
    x: Tensor,
    branch: Branch | None = None,
    modulation: Modulation | None = None,
) -> tuple[Tensor, Tensor | QuantizedInput]:
    """Return the sum, and its norm for the layers that read it.

    Args:
        norm: a LayerNorm.
        readers: layers that ``read_alike``; none: the norm's 16 bit are needed.
        x: (B, T, K).
        branch: is added before.
        modulation: of the norm.
    """
    if branch is not None and not (sums_pay() and branch.is_like(x)):
        x, branch = branch.added_to(x), None
    if readers and _has_fused_op(norm, readers[0], x, modulation):
        if branch is None:
            return x, _in_one_pass(norm, readers[0], x, modulation)
        return _summed_in_one_pass(norm, readers[0], x, branch, modulation)
    x = x if branch is None else branch.added_to(x)
    y = norm(x)
    if modulation is not None:
        y = y * (1 + modulation.scale[:, None]) + modulation.shift[:, None]
    return x, readers[0].as_codes(y) if readers else y


def _has_fused_op(
    norm: Any, reader: PackedLinear, x: Tensor, modulation: Modulation | None
) -> bool:
    """Tell whether one operation computes the norm and its codes."""
    if type(norm) is not nn.LayerNorm or is_watched(norm) or not reader.takes_parts:
        return False
    numbers = norm._parameters  # noqa: SLF001  getattr takes ten times as long
    weight, bias = numbers["weight"], numbers["bias"]
    if weight is not None and weight.dtype is not x.dtype:
        return False
    if x.shape[-1] % _ALIGNED or (bias is not None and bias.dtype is not x.dtype):
        return False
    if modulation is not None and modulation.scale.dtype is not x.dtype:
        return False
    name = name_for("layer_norm_codes", reader.scheme.input.name)
    found: bool = has_kernel(name, str(x.device), x.shape[-1])
    return found


def _in_one_pass(
    norm: nn.LayerNorm, reader: PackedLinear, x: Tensor, modulation: Modulation | None
) -> QuantizedInput:
    operator = operator_for("layer_norm_codes", reader.scheme.input.name)
    codes: Tensor = operator(_rows(x), *_between(norm, reader, modulation))
    return QuantizedInput(codes, reader.static_scale, x.shape, x.dtype)


def _summed_in_one_pass(
    norm: nn.LayerNorm,
    reader: PackedLinear,
    x: Tensor,
    branch: Branch,
    modulation: Modulation | None,
) -> tuple[Tensor, QuantizedInput]:
    """Return the sum, and the codes of its norm."""
    operator = operator_for("sum_norm_codes", reader.scheme.input.name)
    others = _between(norm, reader, modulation)
    total, codes = operator(_rows(x), _rows(branch.x), branch.gate, *others)
    return total.reshape(x.shape), QuantizedInput(codes, reader.static_scale, x.shape, x.dtype)


def _between(
    norm: nn.LayerNorm, reader: PackedLinear, modulation: Modulation | None
) -> tuple[Any, ...]:
    """Return the operands after the norm's input, and the options."""
    up, by = modulation or (None, None)
    numbers = (norm.weight, norm.bias, up, by, *reader.smooth_and_scale)
    return *numbers, norm.eps, True, reader.scheme.input.name


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
