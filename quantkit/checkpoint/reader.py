"""Opening packed checkpoints, with the checks that need headers and scales only."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.contents import broken_scales
from quantkit.checkpoint.metadata import METADATA_KEY, parse_metadata
from quantkit.checkpoint.spec import QUANT_METHOD, PackedConfig, parse_config
from quantkit.checkpoint.validate import Index, Shard, broken_rules
from quantkit.errors import CheckpointError
from quantkit.models.location import refuse_no_directory
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.models.source import ENCODER_WEIGHTS, WEIGHTS
from quantkit.storage.jsonfile import read_json
from quantkit.storage.shard_index import read_shard_index
from quantkit.storage.tensorfile import read_header

#: For the messages about a JSON file that cannot be read.
_CURE = "download it or pack the model again"


@dataclass(frozen=True)
class Packed:
    """A packed directory."""

    path: Path
    #: the packed ones only; empty when nothing in the directory is packed
    components: tuple[PackedComponent, ...]


def open_packed(path: Path) -> Packed:
    """Open a packed pipeline, or one packed component, and check every cheap rule.

    Raises:
        CheckpointError: not a diffusers directory, or a rule of FORMAT.md is broken.
    """
    packed = read_packed(path)
    for component in packed.components:
        for breach in _cheap_breaches(component):
            raise CheckpointError(breach)
    return packed


def read_packed(path: Path) -> Packed:
    """Return a packed pipeline, or one packed component, before any rule was checked.

    Raises:
        CheckpointError: not a diffusers directory, or a file that cannot be read at all.
    """
    components = (_open_component(name, folder) for name, folder in find_components(path))
    return Packed(path, tuple(components))


def find_components(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the packed components of a directory: sub-folder, path.

    Raises:
        CheckpointError: no directory, or a config.json that is none.
    """
    refuse_no_directory(path)
    if (path / "model_index.json").is_file():
        for config in sorted(path.glob("*/config.json")):
            if _is_packed(config):
                yield config.parent.name, config.parent
    elif _is_packed(path / "config.json"):
        yield "", path


def _cheap_breaches(component: PackedComponent) -> Iterator[str]:
    """Yield breaches in headers, or else in scales, which need valid headers."""
    structure = list(broken_rules(component.config, component.shards, component.index))
    yield from structure or broken_scales(component)


def _is_packed(config: Path) -> bool:
    entry = read_json(config, error=CheckpointError, cure=_CURE).get(CONFIG_KEY)
    return isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD


def _open_component(name: str, path: Path) -> PackedComponent:
    values = read_json(path / "config.json", error=CheckpointError, cure=_CURE)
    config = _parsed_config(path / "config.json", values)
    index = _read_index(path)
    files = _single_file(path) if index is None else _indexed_files(index)
    shards = tuple(_open_shard(file) for file in files)
    return PackedComponent(name, path, _class_of(name, path, values), config, shards, index)


def _class_of(name: str, path: Path, values: dict[str, Any]) -> str:
    """Return the class of a component; transformers' configs name that of the model as trained."""
    if "_class_name" not in values and name:
        entry = read_json(path.parent / "model_index.json", error=CheckpointError).get(name)
        return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 else "None"
    match values.get("architectures"):
        case [str(class_name), *_]:
            return str(values.get("_class_name", class_name))
    return str(values.get("_class_name"))


def _parsed_config(path: Path, values: dict[str, Any]) -> PackedConfig:
    try:
        return parse_config(values[CONFIG_KEY])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _open_shard(path: Path) -> Shard:
    header = read_header(path, error=CheckpointError)
    text = header.metadata.get(METADATA_KEY)
    if text is None:
        raise CheckpointError(
            f"{path}: no {METADATA_KEY!r} in the header metadata: not written by quantkit; pack "
            "the model again"
        )
    try:
        return Shard(header, parse_metadata(text))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _single_file(path: Path) -> tuple[Path, ...]:
    files = tuple(sorted(_weights(path, ".safetensors")))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(
            f"{path}: found {len(files)} weight files ({names}) and no index, expected one file; "
            "pack the model again"
        )
    return files


def _weights(path: Path, ending: str) -> Iterator[Path]:
    """Yield weight files, or indexes, by the names that diffusers and transformers give them."""
    for stem in (WEIGHTS, ENCODER_WEIGHTS):
        yield from path.glob(f"{stem}*{ending}")


def _read_index(path: Path) -> Index | None:
    files = sorted(_weights(path, ".safetensors.index*.json"))
    if not files:
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: found {len(files)} indexes ({names}), expected one")
    found = read_shard_index(files[0], error=CheckpointError, cure=_CURE)
    total = found.metadata.get("total_size")
    if type(total) is not int:
        raise CheckpointError(f"{files[0]}: total_size {total!r:.80}, expected bytes; {_CURE}")
    return Index(files[0], total, found.weight_map)


def _indexed_files(index: Index) -> tuple[Path, ...]:
    """Return the shards that the index names, which must be those that are there."""
    folder = index.path.parent
    named = {folder / name for name in index.weight_map.values()}
    found = set(_weights(folder, ".safetensors"))
    for path in sorted(named - found):
        raise CheckpointError(f"{path}: missing shard; download it or pack the model again")
    for path in sorted(found - named):
        raise CheckpointError(f"{path}: not in {index.path.name}; remove it or pack again")
    return tuple(sorted(named))
