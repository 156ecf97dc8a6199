"""Opening packed checkpoints: headers and scales are checked always, all bytes on request."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.contents import broken_checksum, broken_scales, broken_weight
from quantkit.checkpoint.metadata import METADATA_KEY, parse_metadata
from quantkit.checkpoint.spec import (
    CONFIG_KEY,
    PACKED_PARTS,
    QUANT_METHOD,
    PackedConfig,
    parse_config,
)
from quantkit.checkpoint.validate import Index, Shard, broken_rules
from quantkit.errors import CheckpointError, ModelError
from quantkit.jsonfile import read_json
from quantkit.models.source import WEIGHTS
from quantkit.numerics.threads import one_torch_thread
from quantkit.progress import Progress, tracked
from quantkit.tensorfile import read_header

__all__ = ["Packed", "PackedComponent", "Verification", "find_breaches", "open_packed", "verify"]


@dataclass(frozen=True)
class Packed:
    """A packed directory."""

    path: Path
    #: the packed ones only; empty when nothing in the directory is packed
    components: tuple[PackedComponent, ...]


@dataclass(frozen=True)
class Verification:
    """What was checked, and what was found."""

    components: int
    layers: int
    tensors: int
    nbytes: int
    #: one line each; empty when every rule holds
    breaches: tuple[str, ...]


def open_packed(path: Path) -> Packed:
    """Open a packed pipeline, or one packed component, and check every cheap rule.

    Raises:
        CheckpointError: not a diffusers directory, or a rule of FORMAT.md is broken.
    """
    components = tuple(_open_component(name, folder) for name, folder in _find_components(path))
    for component in components:
        for breach in _cheap_breaches(component):
            raise CheckpointError(breach)
    return Packed(path, components)


def verify(path: Path, *, progress: Progress) -> Verification:
    """Recompute every checksum and check every rule of FORMAT.md.

    Args:
        path: a packed pipeline or component.
        progress: told of tensors done.

    Returns:
        what was checked.

    Raises:
        CheckpointError: the first rule that is broken, or nothing is packed.
    """
    result = find_breaches(path, progress=progress, stop_at_first=True)
    if result.breaches:
        raise CheckpointError(result.breaches[0])
    return result


def find_breaches(path: Path, *, progress: Progress, stop_at_first: bool = False) -> Verification:
    """Check every rule of FORMAT.md and collect what is broken.

    Args:
        path: a packed pipeline or component.
        progress: told of tensors done.
        stop_at_first: end at the first breach.

    Raises:
        CheckpointError: a file that cannot be read at all, or nothing is packed.
    """
    components = [_open_component(name, folder) for name, folder in _find_components(path)]
    if not components:
        raise CheckpointError(
            f"{path}: nothing in it is packed by quantkit; wanted the output of 'quantkit pack'"
        )
    found = chain.from_iterable(_all_breaches(component, progress) for component in components)
    with one_torch_thread():
        breaches = tuple(islice(found, 1 if stop_at_first else None))
    tensors = [info for c in components for _, info in c.tensors.values()]
    layers = sum(len(component.config.layers) for component in components)
    nbytes = sum(info.nbytes for info in tensors)
    return Verification(len(components), layers, len(tensors), nbytes, breaches)


def _cheap_breaches(component: PackedComponent) -> Iterator[str]:
    """Yield what headers break, or else what scales break: those need good headers."""
    structure = list(broken_rules(component.config, component.shards, component.index))
    yield from structure or broken_scales(component)


def _all_breaches(component: PackedComponent, progress: Progress) -> Iterator[str]:
    structure = list(broken_rules(component.config, component.shards, component.index))
    if structure:
        # Shapes are not to be trusted, so data is not looked at.
        yield from structure
        return
    yield from broken_scales(component)
    damaged = set()
    whose = component.name or component.class_name
    for name in tracked(progress, f"checksums of {whose}", list(component.tensors)):
        for breach in broken_checksum(component, name):
            damaged.add(name)
            yield breach
    for layer in tracked(progress, f"codes of {whose}", list(component.config.layers)):
        # What is damaged breaks other rules too, which would say nothing new.
        if damaged.isdisjoint(f"{layer}.{part}" for part in PACKED_PARTS):
            yield from broken_weight(component, layer)


def _find_components(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the packed components of a directory: sub-folder, path."""
    if (path / "model_index.json").is_file():
        for config in sorted(path.glob("*/config.json")):
            if _is_packed(config):
                yield config.parent.name, config.parent
    elif (path / "config.json").is_file():
        if _is_packed(path / "config.json"):
            yield "", path
    else:
        raise CheckpointError(
            f"{path}: not a diffusers directory: found neither model_index.json nor config.json"
        )


def _is_packed(config: Path) -> bool:
    entry = _read(config).get(CONFIG_KEY)
    return isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD


def _open_component(name: str, path: Path) -> PackedComponent:
    values = _read(path / "config.json")
    config = _parsed_config(path / "config.json", values)
    index = _read_index(path)
    files = _single_file(path) if index is None else _indexed_files(index)
    shards = tuple(_open_shard(file) for file in files)
    return PackedComponent(name, path, str(values.get("_class_name")), config, shards, index)


def _parsed_config(path: Path, values: dict[str, Any]) -> PackedConfig:
    try:
        return parse_config(values[CONFIG_KEY])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _open_shard(path: Path) -> Shard:
    try:
        header = read_header(path)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    # A damaged header may hold anything here.
    text = dict(header.metadata or {}).get(METADATA_KEY)
    if not isinstance(text, str):
        raise CheckpointError(
            f"{path}: no {METADATA_KEY!r} in the header metadata: not written by quantkit; pack "
            "the model again"
        )
    try:
        return Shard(header, parse_metadata(text))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _single_file(path: Path) -> tuple[Path, ...]:
    files = tuple(sorted(path.glob(f"{WEIGHTS}*.safetensors")))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(
            f"{path}: found {len(files)} weight files ({names}) and no index, wanted one file; "
            "pack the model again"
        )
    return files


def _read_index(path: Path) -> Index | None:
    files = sorted(path.glob(f"{WEIGHTS}*.safetensors.index*.json"))
    if not files:
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: found {len(files)} indexes ({names}), wanted one")
    values = _read(files[0])
    try:
        total = values["metadata"]["total_size"]
        weight_map = {str(name): str(file) for name, file in values["weight_map"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{files[0]}: damaged index ({error!r}); pack again") from error
    return Index(files[0], total, weight_map)


def _indexed_files(index: Index) -> tuple[Path, ...]:
    """Return the shards that the index names, which must be those that are there."""
    folder = index.path.parent
    named = {folder / name for name in index.weight_map.values()}
    found = set(folder.glob(f"{WEIGHTS}*.safetensors"))
    for path in sorted(named - found):
        raise CheckpointError(f"{path}: missing shard; download it or pack the model again")
    for path in sorted(found - named):
        raise CheckpointError(f"{path}: not in {index.path.name}; remove it or pack again")
    return tuple(sorted(named))


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
