"""Activations fused with quantization for the next layer.

For an activation between two layers, 16 bit are written, read, written and read again to be
quantized. On a GPU one operation computes activation and codes and writes codes only, as for norms
(``norm_codes``). Where the layer before is packed, its product writes them
(``device.ops.project_gelu``). Where torch.compile quantizes by itself (``compiler_fuses``), its own
kernel does the same.
"""

from typing import Any

import torch
from diffusers.models.activations import GELU, LinearActivation
from torch import Tensor, nn

from quantkit.device.ops.norms.activations import ALIGNED
from quantkit.device.ops.table import name_for
from quantkit.device.torch_operators import operator_for
from quantkit.inference.layers.compiler_fuses import compiler_quantizes
from quantkit.inference.layers.fused_op import has_kernel, pays
from quantkit.inference.layers.modules import is_watched
from quantkit.inference.layers.prompts import is_plain
from quantkit.inference.layers.quantized_input import QuantizedInput

#: torch's name of a gelu -> the operation's.
_GELUS = {"none": "gelu", "tanh": "tanh"}


def word_of(activation: Any) -> str | None:
    """Return the operation's name of an activation module of torch, or of diffusers."""
    if type(activation) is LinearActivation:
        activation = activation.activation
    if type(activation) is nn.SiLU:
        return "silu"
    known = type(activation) in (nn.GELU, GELU)
    return _GELUS.get(activation.approximate) if known else None


def has_fused_op(
    activation: Any, reader: Any, x: Tensor | QuantizedInput, prefix: Tensor | None = None
) -> bool:
    """Tell whether one operation computes an activation and the codes that a layer reads.

    Args:
        activation: has a word, and nobody waits for its call.
        reader: what reads it alone.
        x: what is activated, or what that is made of.
        prefix: what stands left of it.
    """
    if not _can_end(activation, reader) or compiler_quantizes(x) or not _fit(x, reader, prefix):
        return False
    name = name_for("gelu_codes", reader.scheme.input.name)
    found: bool = has_kernel(name, str(x.device), reader.k)
    return found


def has_fused_product(
    layer: Any,
    activation: Any,
    reader: Any,
    x: Tensor | QuantizedInput,
    prefix: Tensor | None = None,
) -> bool:
    """Tell whether one operation computes a layer, the activation after it, and its codes.

    Args:
        layer: what is activated is its output.
        activation: has a word, and nobody waits for its call.
        reader: what reads it alone.
        x: the layer's input.
        prefix: what stands left of the activation.
    """
    if not is_plain(layer) or not _can_end(activation, reader) or not _fit(x, reader, prefix):
        return False
    kinds = (layer.scheme.input, reader.scheme.input)
    # A kernel writes codes of the kind that it reads.
    if not layer.writes_codes or kinds[0].is_integer is not kinds[1].is_integer:
        return False
    sparse = layer.weight_meta is not None
    name = name_for("project_gelu", kinds[0].name, layer.scheme.codes.name, sparse=sparse)
    device = str(x.device)
    if not pays(name, device):
        return False
    found: bool = has_kernel(name, device, layer.k)
    return found


def _can_end(activation: Any, reader: Any) -> bool:
    """Tell whether an activation has no hooks and its reader takes codes column by column."""
    if word_of(activation) is None or is_watched(activation) or not is_plain(reader):
        return False
    if type(activation) is LinearActivation and is_watched(activation.activation):
        return False
    takes: bool = reader.takes_parts
    return takes


def _fit(x: Tensor | QuantizedInput, reader: Any, prefix: Tensor | None) -> bool:
    if prefix is None:
        return True
    odd = prefix.shape[-1] % ALIGNED or reader.k % ALIGNED
    return not odd and prefix.dtype is x.dtype


def activated(
    activation: Any, reader: Any, x: Tensor, prefix: Tensor | None = None
) -> QuantizedInput:
    """Return the codes of an activation, where ``has_fused_op``.

    Args:
        activation: what is computed.
        reader: what reads the codes, of K columns.
        x: (..., K), or what is right of ``prefix``.
        prefix: is quantized as it is, and stands left.
    """
    smooth, scale = reader.smooth_and_scale
    name = reader.scheme.input.name
    rows = x.reshape(-1, x.shape[-1])
    left = None if prefix is None else prefix.reshape(-1, prefix.shape[-1])
    codes: Tensor = operator_for("gelu_codes", name)(
        rows, left, smooth, scale, word_of(activation), name
    )
    return QuantizedInput(codes, scale, x.shape[:-1] + codes.shape[1:], x.dtype)


def projected(
    layer: Any,
    activation: Any,
    reader: Any,
    x: Tensor | QuantizedInput,
    prefix: Tensor | None = None,
) -> QuantizedInput:
    """Return codes of a layer's activation, where ``has_fused_product``; else as ``activated``."""
    codes = layer.activated_codes(x, reader, word_of(activation), prefix)
    return QuantizedInput(
        codes, reader.static_scale, torch.Size((*x.shape[:-1], reader.k)), x.dtype
    )
