"""Self-attention with three projections fused into one launch that writes codes.

Factors and means of heads are folded into scales and biases of the projections when a model is
loaded: folding in every call would cost more launches than projections and attention.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.checkpoint.packed_attention import CHILD
from quantkit.device.ops.table import is_operation, name_for
from quantkit.inference.attention.attention_ends import HeadProduct
from quantkit.inference.attention.attention_heads import Shape, has_kernel
from quantkit.inference.attention.fused_qkv import why_apart
from quantkit.inference.layers.head_scales import FoldedScales, HeadScales
from quantkit.inference.layers.modules import PackedLinear
from quantkit.inference.layers.prompts import is_plain
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.numerics.attention_factors import score_factor, unit_factors, with_padding
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.numerics.formats import E4M3FN

_NAMES = ("to_q", "to_k", "to_v")


class JointProjections(NamedTuple):
    """The projections of an attention module, and the folded scales of their codes."""

    q: PackedLinear
    k: PackedLinear
    v: PackedLinear
    folds: FoldedScales


def install(model: nn.Module) -> None:
    """Fold scales of attention into projections that can be one launch."""
    for module in model.modules():
        child = getattr(module, CHILD, None)
        if isinstance(child, HeadScales):
            child.keep(_folded(module, child().scales))


def joint_of(
    module: Any, folds: FoldedScales | None, device: torch.device
) -> JointProjections | None:
    """Return the projections of a module that are one launch on ``device``; None where not."""
    if folds is None:
        return None
    q, k, v = (getattr(module, name) for name in _NAMES)
    # Adapters take a layer's place after the model was loaded.
    if not all(map(is_plain, (q, k, v))) or not has_kernel(_operation(q), str(device), q.k):
        return None
    return JointProjections(q, k, v, folds)


def joint_product(joint: JointProjections, x: Tensor | QuantizedInput, shape: Shape) -> HeadProduct:
    """Return attention of an input (B, T, K) to itself on e4m3fn codes."""
    q, k, v, folds = joint
    codes, keys, values = q.codes_of_heads(x, (k, v), folds, shape.heads)
    return HeadProduct(
        (codes, keys, values, None, None, folds.value_scale, folds.value_mean),
        (x.shape[1], *shape, E4M3FN.name, x.dtype),
    )


@torch.no_grad()
def _folded(module: Any, scales: AttentionScales) -> FoldedScales | None:
    layers = [getattr(module, name, None) for name in _NAMES]
    if not all(map(is_plain, layers)) or scales.key_mean.is_meta:
        return None
    first: PackedLinear = layers[0]  # type: ignore[assignment]  # they are plain
    if not _is_joint(first) or why_apart(layers) or any(layer.n != first.n for layer in layers):  # type: ignore[union-attr]  # as above
        return None
    size = scales.head_size
    tau = score_factor(size, None)
    factors = unit_factors(scales.query_range, scales.key_range, tau)
    by_head = [factor.repeat_interleave(size) for factor in factors]
    means = (None, scales.key_mean.flatten(), scales.value_mean.flatten())
    each = (*by_head, (1 / scales.value_scale).flatten())
    pairs = [
        layer.folded(mean, factor)  # type: ignore[union-attr]  # as above
        for layer, mean, factor in zip(layers, means, each, strict=True)
    ]
    scale = torch.stack([scale for scale, _ in pairs])
    bias = [scale[0].new_zeros(first.n) if offset is None else offset for _, offset in pairs]
    wide = with_padding(scales)
    return FoldedScales(scale, torch.stack(bias), wide.value_scale, wide.value_mean)


def _is_joint(layer: PackedLinear) -> bool:
    """Tell whether an operation can project a layer jointly, with the same scales at each step."""
    return layer.writes_codes and is_operation(*_kind(layer), sparse=_is_sparse(layer))


def _operation(layer: PackedLinear) -> str:
    return name_for(*_kind(layer), sparse=_is_sparse(layer))


def _kind(layer: PackedLinear) -> tuple[str, str, str]:
    return "project_heads", layer.scheme.input.name, layer.scheme.codes.name


def _is_sparse(layer: PackedLinear) -> bool:
    return layer.scheme.sparsity is not None
