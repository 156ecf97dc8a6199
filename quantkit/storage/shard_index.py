"""The index of a model's shards: which file holds which tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, ModelError
from quantkit.storage.jsonfile import read_json

#: Tensors of a model; the largest published ones have a tenth.
_MOST_TENSORS = 100_000
#: Bytes of so many names and the files that hold them.
_MOST_BYTES = 16 * 2**20
#: Shards of a model: beyond, one file is named in thousands of ways.
_MOST_SHARDS = 10_000


@dataclass(frozen=True)
class ShardIndex:
    """An index of shards; its file names are relative to its folder."""

    path: Path
    metadata: Mapping[str, Any]
    #: tensor to file name
    weight_map: Mapping[str, str]

    @property
    def shards(self) -> tuple[Path, ...]:
        """The files that it names, sorted."""
        return tuple(self.path.parent / name for name in sorted(set(self.weight_map.values())))


def read_shard_index(
    path: Path, *, error: type[InputError] = ModelError, cure: str = "download it again"
) -> ShardIndex:
    """Return an index, within limits.

    Args:
        path: the file.
        error: what to raise.
        cure: what the user should do, for the messages.

    Raises:
        InputError: of class ``error``: no JSON object, too large, without a weight_map, with
            metadata that is no object, or with a name that is no file's in its folder.
    """
    values = read_json(path, error=error, cure=cure, limit=_MOST_BYTES)
    if why := _fault(values):
        raise error(f"{path}: {why}; {cure}")
    return ShardIndex(path, values.get("metadata") or {}, values["weight_map"])


def _fault(values: Mapping[str, Any]) -> str:
    """Return what is wrong with the types and sizes of an index; empty when nothing is."""
    metadata, table = values.get("metadata"), values.get("weight_map")
    if not (metadata is None or isinstance(metadata, dict)):
        return f"metadata is {metadata!r:.80}, expected an object"
    if not isinstance(table, dict) or not table:
        return "no weight_map"
    if len(table) > _MOST_TENSORS:
        return f"weight_map has {len(table):,} tensors, expected at most {_MOST_TENSORS:,}"
    names = set(map(str, table.values()))
    if len(names) > _MOST_SHARDS:
        return f"weight_map has {len(names):,} files, expected at most {_MOST_SHARDS:,}"
    for name in table.values():
        if not isinstance(name, str) or not _is_plain(name):
            return f"weight_map names the file {name!r:.80}, expected the plain name of a shard"
    return ""


def _is_plain(name: str) -> bool:
    return bool(name) and Path(name).name == name and name.isprintable()
