"""The table of layers: format, errors, bytes and backend of each."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from quantkit.eval.judging.evaluation_result import LayerRow
from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.reader import Packed
from quantkit.inference.layers.deviation import LayerDeviation
from quantkit.inference.layers.layer_summary import LayerInfo
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.source import Component, Model
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.progress import Progress, tracked
from quantkit.storage.digest import sha256_of

#: Where a layer is: its component's name and its module path inside it.
Place = tuple[str, str]

_INPUTS = {
    Activation.NONE: "input in 16 bit",
    Activation.STATIC: "input static",
    Activation.TOKEN: "input per token",
}


def layer_rows(
    model: Model,
    packed: Packed,
    infos: Mapping[Place, LayerInfo],
    deviations: Mapping[Place, LayerDeviation],
    progress: Progress,
) -> tuple[LayerRow, ...]:
    """Return one row per Linear and Conv2d of the denoising components, in the files' order.

    Args:
        model: the original's files.
        packed: the packed files.
        infos: what computes each packed layer, from the loaded pipeline.
        deviations: what was seen on real inputs.
        progress: told about every layer.
    """
    rows = []
    for component, entry, layer in tracked(progress, "layer table", list(_places(model, packed))):
        place = (component.name, layer.name)
        rows.append(_row(component, entry, layer, infos.get(place), deviations.get(place)))
    return tuple(rows)


def foreign_layers(model: Model, packed: Packed) -> tuple[str, ...]:
    """Return the packed layers whose recorded source weight is not the one in ``model``."""
    return tuple(
        ".".join(filter(None, (component.name, layer.name)))
        for component, entry, layer in _places(model, packed)
        if layer.name in entry.records
        and entry.records[layer.name].source_sha256 != sha256_of(layer.shard, layer.weight)
    )


def describe(scheme: Scheme) -> str:
    """Return a scheme in words, as ``e4m3fn per channel, 2:4, input per token``."""
    parts = [f"{scheme.weight.name} per {scheme.granularity}"]
    if scheme.sparsity is not None:
        parts.append("2:4")
    parts.append(_INPUTS[scheme.activation])
    if scheme.buckets:
        parts[-1] += f" ({len(scheme.buckets) + 1} buckets)"
    if scheme.token_below is not None:
        parts[-1] += f", per token below timestep {scheme.token_below:g}"
    if scheme.smooth:
        parts.append("smoothed")
    return ", ".join(parts)


def relative_error(original: Tensor, other: Tensor) -> float:
    """Return ||original - other|| / ||original||; 0 when both are zero."""
    norm = torch.linalg.vector_norm(original.double())
    gap = torch.linalg.vector_norm(original.double() - other.double())
    return 0.0 if float(gap) == 0.0 else float(gap / norm)


def _places(model: Model, packed: Packed) -> Iterator[tuple[Component, PackedComponent, Layer]]:
    entries = {entry.name: entry for entry in packed.components}
    for component in model.components:
        if component.name in entries:
            for layer in list_layers(component):
                yield component, entries[component.name], layer


def _row(
    component: Component,
    entry: PackedComponent,
    layer: Layer,
    info: LayerInfo | None,
    deviation: LayerDeviation | None,
) -> LayerRow:
    scheme = entry.config.scheme_of(layer.name)
    size = layer.weight.nbytes
    if scheme is None or info is None:
        words = f"{layer.weight.dtype}, not packed"
        return LayerRow(component.name, layer.name, layer.kind, layer.shape, words, "torch", "",
                        None, None, None, size, size)  # fmt: skip
    source = read_tensor(layer.shard, layer.weight.name)
    before, after = entry.layer_bytes(layer.name)
    return LayerRow(
        component=component.name,
        name=layer.name,
        kind=layer.kind,
        shape=layer.shape,
        format=describe(scheme),
        backend=info.backend,
        reason=info.reason,
        weight_error=relative_error(source, entry.dequantized(layer.name)),
        output_error=deviation.dense if deviation else None,
        deviation=deviation.kernel if deviation and deviation.watched else None,
        bytes_before=before,
        bytes_after=after,
    )


def read_tensor(path: Path, name: str) -> Tensor:
    """Return one tensor of a safetensors file in float32."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        tensor = file.get_tensor(name)
    assert isinstance(tensor, Tensor)
    return tensor.float()
