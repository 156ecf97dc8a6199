"""A 16-bit pipeline in the packed one's place: sparse, recovered, or finetuned, and not packed."""

from collections.abc import Iterator
from pathlib import Path

import torch
from quantkit.eval.judging.evaluation_result import LayerRow, Packing
from quantkit.eval.judging.layer_table import read_tensor, relative_error

from quantkit.errors import ModelError
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.source import Component, Model, open_model
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.progress import Progress, tracked


def open_unpacked(path: Path, model: Model) -> Model:
    """Open a pipeline that is not packed and has the denoisers of ``model``.

    Raises:
        ModelError: a component alone, other denoisers, or other layers.
    """
    other = open_model(str(path))
    kinds, expected = _kinds(other), _kinds(model)
    if not other.is_pipeline or kinds != expected:
        raise ModelError(
            f"{path}: not packed, and its denoisers are {', '.join(kinds)}, expected "
            f"{', '.join(expected)} as in {model.path}; pass two directories of the same pipeline"
        )
    for mine, theirs in zip(model.components, other.components, strict=True):
        odd = _shapes(mine).items() ^ _shapes(theirs).items()
        if odd:
            raise ModelError(
                f"{theirs.path}: {len(odd)} layers differ in name or shape from {mine.path}, as "
                f"{min(odd)[0]}; pass two directories of the same pipeline"
            )
    return other


def unpacked_layers(
    model: Model, other: Model, progress: Progress
) -> tuple[tuple[LayerRow, ...], Packing]:
    """Return one row per Linear and Conv2d of the denoisers, and what they amount to.

    In the files' order; a layer whose weights are those of the original has no error. Nothing is
    packed.
    """
    rows, total, sparse = [], 0, []
    for component, mine, theirs in tracked(progress, "layer table", list(_places(model, other))):
        before, after = (read_tensor(layer.shard, layer.weight.name) for layer in (mine, theirs))
        holds = is_sparse(after)
        rows.append(_row(component, mine, theirs, relative_error(before, after), sparse=holds))
        total += after.numel()
        sparse += [after.numel()] * holds
    return tuple(rows), Packing("", len(rows), 0, len(sparse), sum(sparse) / 2 / total)


def _kinds(model: Model) -> list[str]:
    return [f"{component.name} ({component.class_name})" for component in model.components]


def _shapes(component: Component) -> dict[str, tuple[int, ...]]:
    return {layer.name: layer.shape for layer in list_layers(component)}


def _places(model: Model, other: Model) -> Iterator[tuple[str, Layer, Layer]]:
    for mine, theirs in zip(model.components, other.components, strict=True):
        found = {layer.name: layer for layer in list_layers(theirs)}
        for layer in list_layers(mine):
            yield mine.name, layer, found[layer.name]


def _row(component: str, mine: Layer, theirs: Layer, error: float, *, sparse: bool) -> LayerRow:
    return LayerRow(
        component=component,
        name=mine.name,
        kind=mine.kind,
        shape=mine.shape,
        format=f"not packed, {theirs.weight.dtype}{', 2:4' * sparse}",
        backend="torch",
        reason="",
        weight_error=error or None,
        output_error=None,
        deviation=None,
        bytes_before=mine.weight.nbytes,
        bytes_after=theirs.weight.nbytes,
    )


def is_sparse(weight: torch.Tensor) -> bool:
    """Return whether every four consecutive weights along K hold at most two that are not zero.

    Args:
        weight: (N, K) or (N, C, kh, kw).
    """
    rows = to_rows(weight)
    if rows.shape[1] % 4 or not bool(rows.any()):
        return False
    return bool((rows.reshape(-1, 4).count_nonzero(dim=1) <= 2).all())
