"""The tensors of a 16-bit component, by the names that diffusers gives them while it loads.

Uploads of before 2023 call the projections of a UNet's attention query, key, value and proj_attn.
Which is what, the name alone says: no module at ``attentions.N`` has other children of these names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.errors import ModelError
from quantkit.storage.tensorfile import Header, TensorInfo, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from quantkit.models.source import Component

#: Source: diffusers, ModelMixin._fix_state_dict_keys_on_load.
_RENAMED = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_OLD = re.compile(rf"(?:.*\.)?attentions\.\d+\.({'|'.join(_RENAMED)})\.(?:weight|bias)")


def loaded_name(name: str) -> str:
    """Return diffusers' name of a tensor of a file.

    >>> loaded_name("mid_block.attentions.0.proj_attn.bias")
    'mid_block.attentions.0.to_out.0.bias'
    """
    old = _OLD.fullmatch(name)
    return name if old is None else name[: old.start(1)] + _RENAMED[old[1]] + name[old.end(1) :]


def read_source(path: Path) -> Header:
    """Return the header of a shard, its tensors by the names that they are loaded by.

    Raises:
        ModelError: no safetensors file, or one that holds a tensor under both its names.
    """
    header = read_header(path)
    tensors: dict[str, TensorInfo] = {}
    for stored, info in header.tensors.items():
        name = loaded_name(stored)
        if name in tensors or (name != stored and name in header.tensors):
            raise ModelError(
                f"{path}: holds {name} as {stored}, too; load it with diffusers, save_pretrained "
                "it and start from that"
            )
        tensors[name] = replace(info, name=name)
    return replace(header, tensors=tensors)


def source_tensors(component: Component) -> dict[str, tuple[Path, TensorInfo]]:
    """Return every tensor of a component and the shard that holds it.

    Raises:
        ModelError: a damaged file, or a tensor in two of them.
    """
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for shard in component.shards:
        for name, info in read_source(shard).tensors.items():
            if name in found:
                raise ModelError(
                    f"{shard}: {name} is in {found[name][0].name} too; download the component again"
                )
            found[name] = shard, info
    return found


def read_tensor(shard: Path, name: str) -> Tensor:
    """Return a tensor of a shard, by the name that it is loaded by."""
    from safetensors import safe_open

    with safe_open(shard, framework="pt") as file:
        names = file.keys()
        stored = name if name in names else next(n for n in names if loaded_name(n) == name)
        tensor: Tensor = file.get_tensor(stored)
    return tensor


def read_tensors(shard: Path) -> dict[str, Tensor]:
    """Return all tensors of a shard, by the names that they are loaded by."""
    from safetensors.torch import load_file

    return {loaded_name(name): tensor for name, tensor in load_file(shard).items()}
