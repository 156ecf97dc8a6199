"""The JSON files of a packed component: config.json, and the index of the shards."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.checkpoint.spec import PackedConfig
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.packing.writer import ShardPlan
from quantkit.storage.shard_index import read_shard_index


def write_index(index: Path, plans: Sequence[ShardPlan], target: Path) -> None:
    """Write the index of the packed shards, in the form diffusers gives it.

    Args:
        index: the source's.
        plans: the shards.
        target: the file to make.
    """
    metadata = read_shard_index(index).metadata
    table = json.loads(index.read_text(encoding="utf-8"))
    specs = {spec.name: plan for plan in plans for spec in plan.specs}
    size = sum(slot.stop - slot.start for plan in plans for slot in plan.slots.values())
    table["metadata"] = {**metadata, "total_size": size}
    table["weight_map"] = {name: plan.name for name, plan in specs.items()}
    target.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_config(source: Path, config: PackedConfig, target: Path) -> None:
    """Write config.json with the quantization_config: the same keys in the same order and one more.

    Args:
        source: the component's config.json.
        config: the schemes.
        target: the file to make.
    """
    values: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    # diffusers sorts keys; so written, what it saves of a loaded model is the same file again.
    is_sorted = list(values) == sorted(values)
    values[CONFIG_KEY] = dict(sorted(config.to_json().items()))
    values[CONFIG_KEY]["schemes"] = [
        dict(sorted(scheme.items())) for scheme in values[CONFIG_KEY]["schemes"]
    ]
    text = json.dumps(values, indent=2, sort_keys=is_sorted) + "\n"
    target.write_text(text, encoding="utf-8")
