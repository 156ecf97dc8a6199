"""Joint scales of layers that other programs join to one weight."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.checkpoint.weight_reader import SourceTensor
from quantkit.numerics.granularity import PerTensor
from quantkit.packing.encode import tensor_scale
from quantkit.storage.system import open_to_read

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from quantkit.packing.plan import ComponentPlan
    from quantkit.packing.writer import PlannedLayer, ShardPlan


def with_joint_scales(plan: ComponentPlan, groups: Sequence[Collection[str]]) -> ComponentPlan:
    """Return the plan with the largest scale of each group for all of its layers.

    Args:
        plan: of a component.
        groups: module paths. Of one whose layers are not all packed with one scale for the tensor,
            none changes: neither does one that is smoothed, whose weight is another for each layer.
    """
    layers = {name: (shard, row) for shard in plan.shards for name, row in shard.layers.items()}
    scales = dict(_joint_scales(layers, groups))
    return replace(plan, shards=tuple(_with_scales(shard, scales) for shard in plan.shards))


def _joint_scales(
    layers: Mapping[str, tuple[ShardPlan, PlannedLayer]], groups: Sequence[Collection[str]]
) -> Iterator[tuple[str, Tensor]]:
    import torch

    for group in groups:
        found = [layers[name] for name in group if name in layers]
        if len(found) < len(group) or not all(_has_one_scale(row) for _, row in found):
            continue
        scale = torch.stack([_scale_of(shard, row) for shard, row in found]).max()
        for name in group:
            yield name, scale


def _has_one_scale(layer: PlannedLayer) -> bool:
    plan = layer.plan
    return isinstance(plan.scheme.granularity, PerTensor) and plan.smooth is None


def _scale_of(shard: ShardPlan, layer: PlannedLayer) -> Tensor:
    path = shard.source.path
    info = shard.source.tensors[f"{layer.plan.layer}.weight"]
    descriptor = open_to_read(path)
    try:
        return tensor_scale(layer.plan, SourceTensor(path, descriptor, info))
    finally:
        os.close(descriptor)


def _with_scales(shard: ShardPlan, scales: Mapping[str, Tensor]) -> ShardPlan:
    layers = {
        name: replace(row, plan=replace(row.plan, scale=scales[name])) if name in scales else row
        for name, row in shard.layers.items()
    }
    return replace(shard, layers=layers)
