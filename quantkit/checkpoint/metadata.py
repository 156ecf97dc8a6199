"""The ``quantkit`` entry of a shard's header metadata: checksums, dense shapes, the recipe."""

import json
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.schemes import check_keys
from quantkit.checkpoint.spec import FORMAT_VERSION, Kind, check_version, kind_of
from quantkit.errors import CheckpointError
from quantkit.storage.digest import is_digest
from quantkit.storage.jsonfile import DAMAGE, parse_json, short

#: The key in the header metadata of a safetensors file.
METADATA_KEY = "quantkit"

_KEYS = ("format_version", "recipe", "layers", "tensors")
_RECORD_KEYS = ("shape", "source_sha256")


@dataclass(frozen=True)
class LayerRecord:
    """The metadata of a packed layer."""

    #: the dense weight of the module: (N, K) or (N, C, kh, kw)
    shape: tuple[int, ...]
    #: SHA-256 of the source weight's bytes, hex
    source_sha256: str

    @property
    def kind(self) -> Kind:
        """The module's kind, which the rank of the weight tells."""
        return kind_of(self.shape)


@dataclass(frozen=True)
class ShardMetadata:
    """The ``quantkit`` entry of one shard's header metadata."""

    #: the recipe as JSON, for people: nothing reads it back
    recipe: dict[str, Any]
    layers: dict[str, LayerRecord]
    #: SHA-256 of every tensor of the shard, hex
    tensors: dict[str, str]

    def to_text(self) -> str:
        """Return the canonical text: compact JSON, ASCII, names ascending."""
        value = {
            "format_version": FORMAT_VERSION,
            "recipe": self.recipe,
            "layers": {
                name: {"shape": list(record.shape), "source_sha256": record.source_sha256}
                for name, record in sorted(self.layers.items())
            },
            "tensors": dict(sorted(self.tensors.items())),
        }
        return json.dumps(value, separators=(",", ":"))


def parse_metadata(text: str) -> ShardMetadata:
    """Return the ``quantkit`` entry of a shard's header metadata as a value.

    Raises:
        CheckpointError: not JSON, another version, a missing or unknown key, a damaged record.
    """
    where = "header metadata"
    try:
        value = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: not JSON ({short(error)}); pack again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: found {type(value).__name__}, expected a JSON object")
    check_version(value.get("format_version"), where)
    check_keys(value, _KEYS, where)
    try:
        layers = {name: _parse_record(name, item) for name, item in value["layers"].items()}
        tensors = {name: _digest(name, item) for name, item in value["tensors"].items()}
        recipe = dict(value["recipe"])
    except DAMAGE as error:
        raise CheckpointError(f"{where}: damaged ({short(error)}); pack the model again") from error
    return ShardMetadata(recipe, layers, tensors)


def _parse_record(layer: str, item: dict[str, Any]) -> LayerRecord:
    if not isinstance(item, dict):
        raise TypeError(f"layer {layer}: found {type(item).__name__}, expected an object")
    check_keys(item, _RECORD_KEYS, f"header metadata: layer {layer:.80}")
    shape = tuple(item["shape"])
    if len(shape) not in (2, 4) or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"layer {layer:.80}: shape {item['shape']!r:.80}")
    return LayerRecord(shape, _digest(layer, item["source_sha256"]))


def _digest(name: str, value: object) -> str:
    if not isinstance(value, str) or not is_digest(value):
        raise ValueError(f"{name:.80}: {value!r:.80} is no SHA-256 in hex")
    return value
