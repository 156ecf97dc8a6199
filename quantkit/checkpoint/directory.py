"""Rules for the rest of a packed directory: model_index.json and copied weights."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.contents import broken_numbers
from quantkit.checkpoint.metadata import METADATA_KEY
from quantkit.errors import CheckpointError, ModelError
from quantkit.models.sizes import oversized, tensors_below
from quantkit.models.source import weight_files
from quantkit.storage.copying import is_weight, list_files
from quantkit.storage.jsonfile import read_json
from quantkit.storage.shard_index import read_shard_index
from quantkit.storage.tensorfile import read_header

#: What each kind of component has: a model, a scheduler, a tokenizer, a feature extractor.
_CONFIGS = (
    "config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json",
    "processor_config.json", "image_processor_config.json", "video_processor_config.json",
    "guider_config.json",
)  # fmt: skip

_CURE = "download it or pack the model again"


def broken_pipeline(path: Path, packed: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for every way in which model_index.json and the folders disagree.

    Args:
        path: the pipeline.
        packed: name and class of its packed components.
    """
    file = path / "model_index.json"
    try:
        index = read_json(file, error=CheckpointError)
    except CheckpointError as error:
        yield str(error)
        return
    yield from (f"{file}: {why}; {_CURE}" for why in _broken_index_entries(path, index))
    named = dict(_components(index))
    for name, class_name in packed.items():
        if name not in named or named[name][1] != class_name:
            found = f"names {named[name][1]}" if name in named else "does not name it"
            yield f"{path / name}: packed {class_name}, but {file.name} {found}; {_CURE}"
    for name, (library, class_name) in named.items():
        if name not in packed:
            yield from _broken_component(path / name, library, class_name)


def copied_weights(path: Path, packed: set[Path]) -> list[Path]:
    """Return the weight files of a directory that were not packed, sorted; indexes left out."""
    files = (path / file for file in list_files(path) if is_weight(file))
    return [file for file in files if file.suffix != ".json" and file not in packed]


def broken_weights(path: Path) -> Iterator[str]:
    """Yield a line for every fault of a copied safetensors file."""
    try:
        header = read_header(path, error=CheckpointError)
        if METADATA_KEY in header.metadata:
            yield (
                f"{path}: packed weights, but config.json next to it has no quantization_config of "
                f"quantkit; {_CURE}"
            )
            return
        for info in header.tensors.values():
            yield from broken_numbers(path, info)
    except CheckpointError as error:
        yield str(error)


def broken_index(path: Path) -> Iterator[str]:
    """Yield a line for every tensor that an index of copied safetensors places wrongly."""
    try:
        index = read_shard_index(path, error=CheckpointError, cure=_CURE)
        headers = {p.name: read_header(p, error=CheckpointError) for p in index.shards}
    except CheckpointError as error:
        yield str(error)
        return
    for tensor, name in index.weight_map.items():
        if tensor not in headers[name].tensors:
            yield f"{path}: {tensor!r:.80} is not in {name}; {_CURE}"


def _broken_index_entries(path: Path, index: Mapping[str, Any]) -> Iterator[str]:
    """Yield faults in the types of model_index.json's entries, as diffusers reads them."""
    if not _is_name(index.get("_class_name")):
        yield "_class_name names no pipeline"
    version = index.get("_diffusers_version", "0")
    if not _is_version(version):
        yield f"_diffusers_version {version!r:.80} is no version"
    for name, entry in index.items():
        # Lists of numbers are options of the pipeline.
        named = isinstance(entry, list) and any(isinstance(value, str) for value in entry)
        if named or (_is_name(name) and (path / name).is_dir()):
            yield from _broken_entry(name, entry)


def _broken_entry(name: str, entry: object) -> Iterator[str]:
    """Yield faults of a component's entry."""
    match entry:
        case [str(), str(class_name)] if _is_name(class_name):
            if not _is_name(name):
                yield f"component {name!r:.80} is no plain name of a folder"
        case [None, None]:
            pass
        case _:
            yield f"{name:.80} is {entry!r:.80}, expected a library and a class"


def _is_version(value: object) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return isinstance(value, str) and bool(Version(value))
    except InvalidVersion:
        return False


def _is_name(value: object) -> bool:
    """Tell whether a value is an identifier, or a plain name of a folder."""
    return isinstance(value, str) and value.isidentifier() and value.isascii()


def _components(index: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, library and class of components; an optional one that is absent has neither."""
    for name, entry in index.items():
        match entry:
            case [str(library), str(class_name)]:
                yield name, (library, class_name)


def _broken_model(
    folder: Path, library: str, class_name: str, config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for every fault in the weights of a component that was not packed."""
    try:
        weight_files(folder, library, class_name)
    except ModelError as error:
        yield str(error)
    else:
        if problem := oversized(config, tensors_below(folder)):
            yield f"{folder / 'config.json'}: {problem}; {_CURE}"


def _broken_component(folder: Path, library: str, class_name: str) -> Iterator[str]:
    if not folder.is_dir():
        yield f"{folder}: missing, though model_index.json names it ({class_name}); {_CURE}"
        return
    # A folder may hold more than one config; a model's says that there must be weights.
    found = [name for name in _CONFIGS if (folder / name).is_file()]
    if not any(path.is_file() for path in folder.glob("*.json")):
        yield f"{folder}: no config, as {', '.join(_CONFIGS[:3])}; {_CURE}"
    for name in found:
        try:
            config = read_json(folder / name, error=CheckpointError)
        except CheckpointError as error:
            yield str(error)
            continue
        if name == "config.json":
            yield from _broken_model(folder, library, class_name, config)
        # transformers' configs have no such key.
        said = config.get("_class_name", class_name)
        # Of several ControlNets the first lies here: MultiControlNetModel of ControlNetModel.
        known = {class_name, class_name.replace("Multi", "", 1)}
        if said not in known and name in {"config.json", "scheduler_config.json"}:
            yield f"{folder / name}: {said!r:.80}, model_index.json says {class_name}; {_CURE}"
