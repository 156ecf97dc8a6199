"""Group norms fused with activation and quantization in packed models.

diffusers normalises a picture, applies SiLU, and gives it to a convolution, which changes its
layout and quantizes it: four passes over 16 bit. Here the norm's kernels read it with channels
last, as the layer before wrote it, and write codes. Only on a GPU, outside of torch.compile, which
fuses these on its own, and only for layers without hooks, offloading or adapters.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import name_for
from quantkit.device.torch_operators import OPERATORS, operator_for
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.inference.layers.modules import PackedConv2d, PackedLinear, is_watched
from quantkit.numerics.norms import MAX_CHANNELS
from quantkit.numerics.scheme import Activation

#: Channels of a picture must be a multiple of it.
_ALIGNED = 8


def fits(norm: Any, layer: Any) -> bool:
    """Tell whether a norm's layer reads nothing but codes of its output."""
    return type(norm) is nn.GroupNorm and reads_codes(layer) and _is_computed(norm)


def reads_codes(layer: Any) -> bool:
    """Tell whether a layer reads nothing but codes of a static scale of a picture."""
    if type(layer) not in (PackedConv2d, PackedLinear):
        return False
    return layer.scheme.activation is Activation.STATIC


def _is_computed(norm: nn.GroupNorm) -> bool:
    aligned = norm.num_channels % _ALIGNED == 0 and norm.num_channels <= MAX_CHANNELS
    return aligned and bool(norm.affine)


def is_coded(x: Tensor, pairs: tuple[tuple[Any, Any], ...], others: tuple[Any, ...]) -> bool:
    """Tell whether the norm of x writes codes.

    Args:
        x: a picture.
        pairs: norms, and the layers after them.
        others: modules whose calls are left out.
    """
    if torch.compiler.is_compiling():
        return False
    return not any(map(is_watched, others)) and all(_is_pair(x, *pair) for pair in pairs)


def _is_pair(x: Tensor, norm: Any, layer: Any) -> bool:
    # Adapters take a layer's place.
    if not fits(norm, layer) or is_watched(norm) or is_watched(layer):
        return False
    op = name_for("group_norm_codes", layer.scheme.input.name)
    return takes_channels(norm, x) and has_picture_kernel(op, x.device)


def takes_channels(norm: nn.GroupNorm, x: Tensor) -> bool:
    """Tell whether kernels support the sizes and dtype of a picture's norm."""
    same = norm.weight.dtype is x.dtype and norm.bias.dtype is x.dtype
    return same and _is_computed(norm) and x.dtype in IO_DTYPES.values() and x.numel() > 0


def has_picture_kernel(op: str, device: torch.device) -> bool:
    """Tell whether a GPU's kernel computes an operation on pictures with channels last."""
    found: bool = has_kernel(op, str(device), _ALIGNED)
    return found


def pixels(x: Tensor) -> Tensor:
    """Return a picture (B, C, H, W) as (B, H, W, C): contiguous if channels are last in memory."""
    return x.permute(0, 2, 3, 1)


def norm_pictures(norm: nn.GroupNorm, x: Tensor, activation: str) -> Tensor:
    """Return the norm of (B, C, H, W), then an activation, with channels last."""
    rows = pixels(x.contiguous(memory_format=torch.channels_last))
    partials = OPERATORS["group_partials"](rows.flatten(1, 2), None, norm.num_groups)
    y: Tensor = OPERATORS["group_norm"](
        rows.flatten(1, 2), None, partials, norm.weight, norm.bias, norm.eps, activation
    )
    return y.reshape(rows.shape).permute(0, 3, 1, 2)


def norm_codes(
    x: Tensor,
    added: Tensor | None,
    norm: nn.GroupNorm,
    layer: PackedConv2d | PackedLinear,
    activation: str,
) -> Tensor:
    """Return the layer's codes of the norm of (B, T, C) + added (B, C)."""
    partials = OPERATORS["group_partials"](x, added, norm.num_groups)
    fmt = layer.scheme.input.name
    write = operator_for("group_norm_codes", fmt)
    codes: Tensor = write(
        x, added, partials, norm.weight, norm.bias, layer.input_smooth,
        layer.static_scale, norm.eps, activation, fmt,
    )  # fmt: skip
    return codes
