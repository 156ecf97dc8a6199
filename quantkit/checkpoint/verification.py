"""``verify``: every byte of a packed directory, and every rule about it, from files alone."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.contents import (
    broken_numbers,
    broken_scales,
    broken_weight,
    expected_digests,
    unpacked_tensors,
)
from quantkit.checkpoint.copied import misfits_of_copies, unknown_models
from quantkit.checkpoint.directory import (
    broken_index,
    broken_pipeline,
    broken_weights,
    copied_weights,
)
from quantkit.checkpoint.filelist import FILE_LIST, MADE, FileList, find_file_list
from quantkit.checkpoint.reader import Packed, read_packed
from quantkit.checkpoint.side_by_side import breaches_of
from quantkit.checkpoint.spec import PACKED_PARTS, attention_tensors
from quantkit.checkpoint.validate import broken_rules
from quantkit.device.host import checker
from quantkit.errors import CheckpointError, ModelError
from quantkit.models.building import read_skeleton
from quantkit.models.skeleton import Contents, misfits, some
from quantkit.numerics.threads import one_torch_thread
from quantkit.progress import Progress, tracked
from quantkit.storage.copying import list_files
from quantkit.storage.parallel_checks import in_threads


@dataclass(frozen=True)
class Verification:
    """The result of a verification: what was checked, and the faults."""

    #: names of the packed ones; "" for one alone
    components: tuple[str, ...]
    layers: int
    tensors: int
    nbytes: int
    #: of the list, whose digests were compared
    files: int
    #: copied safetensors files that were opened and whose numbers were looked at
    opened: int
    #: skipped checks with reasons; one line each
    unchecked: tuple[str, ...]
    #: one line each; empty when every rule holds
    breaches: tuple[str, ...]


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
        CheckpointError: a file that cannot be read at all, no list of files, or nothing is packed.
    """
    if not _is_text(path):
        raise CheckpointError(f"{path}: its name is not UTF-8, so no loader opens it; rename it")
    packed = read_packed(path)
    if not packed.components:
        raise CheckpointError(
            f"{path}: nothing in it is packed by quantkit; expected the output of 'quantkit pack'"
        )
    try:
        listed, copied = find_file_list(path), _copied(packed)
        # Importing torch takes longer than the core's part of the work.
        with one_torch_thread() if checker.why_unavailable() else nullcontext():
            found = _breaches(packed, listed, copied, progress)
            breaches = tuple(islice(found, 1 if stop_at_first else None))
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error
    tensors = [info for c in packed.components for _, info in c.tensors.values()]
    return Verification(
        tuple(component.name for component in packed.components),
        sum(len(component.config.layers) for component in packed.components),
        len(tensors),
        sum(info.nbytes for info in tensors),
        len(listed.files),
        sum(file.suffix == ".safetensors" for file in copied),
        tuple(_unchecked(packed, listed, copied)),
        breaches,
    )


def contents_of(component: PackedComponent) -> Contents:
    """Return the contents of a packed component with valid headers, to compare with its model."""
    tensors = {name: info.shape for name, (_, info) in component.tensors.items()}
    for layer in component.config.layers:
        for part in PACKED_PARTS:
            tensors.pop(f"{layer}.{part}", None)
        tensors[f"{layer}.weight"] = component.records[layer].shape
    for spec in attention_tensors(component.config.attention):
        tensors.pop(spec.name, None)
    packed = {
        layer: scheme.schedule is not None for layer, scheme in component.config.layers.items()
    }
    return Contents(component.path, packed, tensors)


def _is_text(path: Path) -> bool:
    """Tell whether a name can be written: Python keeps other bytes as halves of surrogates."""
    try:
        str(path.absolute()).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _breaches(
    packed: Packed, listed: FileList, copied: Sequence[Path], progress: Progress
) -> Iterator[str]:
    sound = []
    for component in packed.components:
        structure = list(broken_rules(component.config, component.shards, component.index))
        yield from structure
        if not structure:
            # Else shapes are not to be trusted, and data is not looked at.
            sound.append(component)
    changed: set[Path] = set()
    yield from _list_breaches(listed, changed, progress)
    if (packed.path / "model_index.json").is_file():
        yield from _pipeline_breaches(packed, changed)
    for component in sound:
        if component.path / "config.json" not in changed:
            yield from misfits_of(component)
        yield from _data_breaches(component, progress)
    yield from _copied_breaches(packed, copied, progress)


def _pipeline_breaches(packed: Packed, changed: Collection[Path]) -> Iterator[str]:
    classes = {c.name: c.class_name for c in packed.components}
    broken = list(broken_pipeline(packed.path, classes))
    yield from broken
    if not broken:
        # As below: what is said of changed files is said.
        damaged = {file.relative_to(packed.path).parts[0] for file in changed}
        yield from misfits_of_copies(packed.path, classes.keys() | damaged)


def misfits_of(component: PackedComponent) -> Iterator[str]:
    """Yield a line for everything in which a component does not fit the model of its config."""
    try:
        contents = contents_of(component)
        config = component.path / "config.json"
        skeleton = read_skeleton(config, component.class_name, contents.tensors)
    except CheckpointError as error:
        yield str(error)
        return
    yield from misfits(contents, skeleton)


def _list_breaches(listed: FileList, changed: set[Path], progress: Progress) -> Iterator[str]:
    """Yield breaches of the file list; ``changed`` gets the files with other bytes."""
    yield from listed.broken()
    read, _ = listed.strangers()
    for file in read:
        yield f"{listed.folder / file}: not in {FILE_LIST}; remove it, or pack the model again"
    for claim in tracked(progress, "files", list(listed.claims())):
        if breach := claim.breach():
            changed.add(claim.path)
            yield breach


def _data_breaches(component: PackedComponent, progress: Progress) -> Iterator[str]:
    yield from broken_scales(component)
    damaged = set()
    whose = component.name or component.class_name
    claims = list(expected_digests(component).values())
    found = breaches_of(claims)
    for claim in tracked(progress, f"checksums of {whose}", claims):
        if breach := next(found):
            damaged.add(claim.what.removesuffix(": "))
            yield breach
    # What is damaged breaks other rules too, which would say nothing new.
    whole = [
        layer
        for layer in component.config.layers
        if damaged.isdisjoint(f"{layer}.{part}" for part in PACKED_PARTS)
    ]
    broken = in_threads(lambda layer: list(broken_weight(component, layer)), whole)
    for _ in tracked(progress, f"codes of {whose}", whole):
        yield from next(broken)
    for path, info in unpacked_tensors(component):
        if info.name not in damaged:
            yield from broken_numbers(path, info)


def _copied_breaches(packed: Packed, copied: Sequence[Path], progress: Progress) -> Iterator[str]:
    indexes = [f for f in list_files(packed.path) if ".safetensors.index." in f.name]
    mine = {c.index.path for c in packed.components if c.index is not None}
    for file in indexes:
        if packed.path / file not in mine:
            yield from broken_index(packed.path / file)
    safe = [file for file in copied if file.suffix == ".safetensors"]
    for file in tracked(progress, "copied weights", safe):
        yield from broken_weights(file)


def _copied(packed: Packed) -> list[Path]:
    shards = {header.path for c in packed.components for header in c.headers}
    return copied_weights(packed.path, shards)


def _unchecked(packed: Packed, listed: FileList, copied: Sequence[Path]) -> Iterator[str]:
    others = [
        str(file)
        for file in list_files(packed.path)
        if file.as_posix() not in listed.files and file.name not in MADE
    ]
    if others:
        yield f"not in {FILE_LIST}: {some(others)}"
    closed = [str(f.relative_to(packed.path)) for f in copied if f.suffix != ".safetensors"]
    if closed:
        yield f"not opened: {some(closed)}"
    # What is wrong with an index is a breach.
    with suppress(ModelError):
        if strange := list(unknown_models(packed.path)):
            yield f"not compared with a model: {some(strange)}"
