"""Activations that end in codes for the layer behind them.

Between two layers stands an activation: 16 bit are written, read, written and read again to be
quantized. Where an operation computes activation and codes in one pass (on a GPU), codes are all
that leaves it, as behind norms (``norm_codes``); where torch.compile quantizes by itself
(``fusing``), its own kernel does the same.
"""

from typing import Any

from diffusers.models.activations import GELU, LinearActivation
from torch import Tensor, nn

from quantkit.device.backends import forced
from quantkit.device.ops.activations import ALIGNED
from quantkit.device.ops.table import name_for
from quantkit.inference.fusing import is_fused
from quantkit.inference.modules import is_watched
from quantkit.inference.normed import Normed
from quantkit.inference.one_pass import has_kernel
from quantkit.inference.operators import operator_for
from quantkit.inference.prompts import is_plain

#: torch's name of a gelu -> the operation's.
_GELUS = {"none": "gelu", "tanh": "tanh"}


def word_of(activation: Any) -> str | None:
    """Return the operation's word for a module: torch's, or diffusers' with a layer before it."""
    if type(activation) is LinearActivation:
        activation = activation.activation
    if type(activation) is nn.SiLU:
        return "silu"
    known = type(activation) in (nn.GELU, GELU)
    return _GELUS.get(activation.approximate) if known else None


def is_one_pass(
    activation: Any, reader: Any, x: Tensor | Normed, beside: Tensor | None = None
) -> bool:
    """Tell whether one operation computes an activation and the codes that a layer reads.

    Args:
        activation: has a word, and nobody waits for its call.
        reader: what reads it alone.
        x: what is activated, or what that is made of.
        beside: what stands left of it.
    """
    if word_of(activation) is None or is_watched(activation) or not is_plain(reader):
        return False
    if type(activation) is LinearActivation and is_watched(activation.activation):
        return False
    if not reader.takes_parts or is_fused(x):
        return False
    if beside is not None:
        odd = beside.shape[-1] % ALIGNED or reader.k % ALIGNED
        if odd or beside.dtype is not x.dtype:
            return False
    name = name_for("gelu_codes", reader.scheme.input.name)
    found: bool = has_kernel(name, str(x.device), reader.k, forced())
    return found


def activated(activation: Any, reader: Any, x: Tensor, beside: Tensor | None = None) -> Normed:
    """Return the codes of an activation, where ``is_one_pass``.

    Args:
        activation: what is computed.
        reader: what reads the codes, of K columns.
        x: (..., K), or what is right of ``beside``.
        beside: is quantized as it is, and stands left.
    """
    smooth, shift, scale = reader.changes_of_input
    name = reader.scheme.input.name
    rows = x.reshape(-1, x.shape[-1])
    left = None if beside is None else beside.reshape(-1, beside.shape[-1])
    codes: Tensor = operator_for("gelu_codes", name)(
        rows, left, smooth, shift, scale, word_of(activation), name
    )
    return Normed(codes, scale, x.shape[:-1] + codes.shape[1:], x.dtype)
