"""The state dict of a packed component, as ComfyUI's models name their tensors."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.joined_parts import (
    join_parts,
    joined_scheme,
    swap_row_halves,
    why_separate,
)
from quantkit.checkpoint.spec import PACKED_PARTS
from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES
from quantkit.comfyui.layout import packed_weight
from quantkit.errors import ModelError
from quantkit.interchange.denoiser import Denoiser, packed_denoiser
from quantkit.interchange.joining import join
from quantkit.interchange.layout_names import OriginalTensor, layout_of_model, original_tensors
from quantkit.interchange.tensor_plan import unchanged
from quantkit.numerics.scheme import Scheme

#: A tensor of the first layer, as CLIP, T5 and language models name it -> what ComfyUI's names of
#: all tensors have before theirs.
_ENCODERS = {
    "text_model.encoder.layers.0.mlp.fc1.weight": "",
    "encoder.layers.0.mlp.fc1.weight": "text_model.",
    "encoder.block.0.layer.0.SelfAttention.k.weight": "",
    "model.layers.0.mlp.down_proj.weight": "",
    "layers.0.mlp.down_proj.weight": "model.",
}
#: Not inside of what the prefix names.
_OUTSIDE = ("text_projection.weight", "logit_scale")


def denoiser_state(component: PackedComponent) -> dict[str, Any]:
    """Return a packed denoiser in its authors' layout, packed weights as ``QuantizedTensor``.

    Rows that the layout joins are joined from codes. Where they are packed in different ways, or
    not all of them are packed, the joined weight is dense, in the model's 16-bit dtype.

    Raises:
        ModelError: no layout is known for its class.
    """
    source = packed_denoiser(component)
    layout = layout_of_model(source.class_name, source.shapes)
    return _state(component, source, original_tensors(layout, source.shapes))


def encoder_state(component: PackedComponent) -> dict[str, Any]:
    """Return a packed text encoder under its own names; see ``named_as_published``."""
    source = packed_denoiser(component)
    return _state(component, source, unchanged(source.shapes))


def dequantized_state(
    component: PackedComponent, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a packed component with dense weights in place of codes.

    Args:
        component: packed.
        stored: its tensors as they are in the files.
    """
    layers = component.config.layers
    parts = {f"{layer}.{part}" for layer in layers for part in PACKED_PARTS}
    state = {name: tensor for name, tensor in stored.items() if name not in parts}
    dtypes = {tensor.dtype for tensor in state.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dense = {f"{layer}.weight": component.dequantized(layer).to(dtype) for layer in layers}
    return {**state, **dense}


def named_as_published(state: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return a text encoder's tensors by the names of published files, which ComfyUI knows.

    transformers 5 writes CLIP without the first part of its names, and models without a head have
    none.

    Raises:
        ModelError: of no kind that is known.
    """
    for marker, prefix in _ENCODERS.items():
        if marker in state:
            return {
                name if name in _OUTSIDE else prefix + name: tensor
                for name, tensor in state.items()
            }
    raise ModelError(
        f"{where}: not a text encoder that ComfyUI loads: none of {', '.join(_ENCODERS)} is there; "
        "load its 16-bit file with ComfyUI's CLIP loaders"
    )


def _state(
    component: PackedComponent, source: Denoiser, originals: Iterable[OriginalTensor]
) -> dict[str, Any]:
    return {original.name: _tensor(component, source, original) for original in originals}


def _tensor(component: PackedComponent, source: Denoiser, original: OriginalTensor) -> Tensor:
    parts = original.parts
    if all(part in source.schemes for part in parts):
        schemes = [source.schemes[part] for part in parts]
        layers = [component.parts(part.removesuffix(".weight")) for part in parts]
        if not why_separate(schemes, layers):
            return _joined(source, original, schemes[0], layers)
    values = join(original, [source.read(part) for part in parts])
    is_coded = any(part in source.schemes for part in parts)
    return values.to(FLOAT_DTYPES[source.dtype]) if is_coded else values


def _joined(
    source: Denoiser, original: OriginalTensor, scheme: Scheme, layers: Sequence[dict[str, Tensor]]
) -> Tensor:
    shapes = [source.shapes[part] for part in original.parts]
    shape = (sum(found[0] for found in shapes), *shapes[0][1:])
    parts = layers[0]
    if len(layers) > 1:
        parts, scheme = join_parts(scheme, layers), joined_scheme(scheme)
    if original.swapped:
        parts, scheme = swap_row_halves(scheme, parts), joined_scheme(scheme)
    layer = original.parts[0].removesuffix(".weight")
    weight: Tensor = packed_weight(layer, scheme, parts, shape, FLOAT_DTYPES[source.dtype])
    return weight
