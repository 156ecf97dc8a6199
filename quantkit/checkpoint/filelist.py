"""``quantkit.files.json``: the files of a packed directory, their sizes and their digests."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.storage.copying import is_weight, list_files
from quantkit.storage.digest import ExpectedDigest, is_digest, sha256_of_file
from quantkit.storage.files import rewritten_file
from quantkit.storage.inputfile import open_file
from quantkit.storage.jsonfile import DAMAGE, read_json, short
from quantkit.storage.marker import MARKER

#: At the root of pack's output: of a pipeline, or of a component alone.
FILE_LIST = "quantkit.files.json"
SCHEMA = "quantkit.files"
VERSION = 1

#: The model card, for people who find the files: not listed, since evaluations and authors add to
#: it.
CARD = "README.md"

#: What quantkit adds to a directory: no part of the model, and never copied with it.
MADE = (FILE_LIST, MARKER, CARD)

#: What the loaders of a component read besides its weights: configs, vocabularies, code, templates.
_READ_BESIDE = (".json", ".txt", ".model", ".py", ".jinja")
#: What the loader of a pipeline reads at its root.
_READ_AT_ROOT = (".py",)

_CURE = "download it or pack the model again"


@dataclass(frozen=True)
class FileRecord:
    """The entry of one file in the list."""

    size: int
    #: SHA-256 in hex, of the whole file or, of packed weights, of what precedes the data
    sha256: str
    #: the data has digests of its own, which the header holds
    header_only: bool = False


@dataclass(frozen=True)
class FileList:
    """The list of a packed directory, or the part of it that is about one component."""

    #: the directory that the names are relative to
    folder: Path
    #: by path relative to the directory, with slashes
    files: Mapping[str, FileRecord]

    def claims(self) -> Iterator[ExpectedDigest]:
        """Yield the expected digests of the files that exist."""
        for name, record in self.files.items():
            path = self.folder / name
            if path.is_file():
                stop = header_bytes(path) if record.header_only else record.size
                what = "its header: " if record.header_only else ""
                yield ExpectedDigest(path, what, 0, stop, record.sha256)

    def broken(self, *, only_read: bool = False) -> Iterator[str]:
        """Yield a line for every file that is missing or of another size.

        Args:
            only_read: let those be missing that no loader reads.
        """
        for name, record in self.files.items():
            path = self.folder / name
            if not path.is_file():
                if only_read and not is_read(self.folder, Path(name)):
                    continue
                yield f"{path}: missing, though {FILE_LIST} names it; {_CURE}"
            elif (size := path.stat().st_size) != record.size:
                yield f"{path}: {size} bytes, {FILE_LIST} says {record.size}; {_CURE}"

    def strangers(self) -> tuple[list[Path], list[Path]]:
        """Return files that the list lacks: those that a loader would read, and the others."""
        files = (file for file in list_files(self.folder) if file.name not in MADE)
        found = [file for file in files if file.as_posix() not in self.files]
        read = [file for file in found if is_read(self.folder, file)]
        return read, [file for file in found if file not in set(read)]


def is_read(folder: Path, file: Path) -> bool:
    """Tell whether a loader may read a file of a directory, relative to it."""
    if any(part.startswith(".") for part in file.parts):
        return False
    if is_weight(file):
        return True
    if len(file.parts) == 1 and (folder / "model_index.json").is_file():
        return file.suffix in _READ_AT_ROOT or file.name == "model_index.json"
    return file.suffix in _READ_BESIDE


def find_file_list(folder: Path) -> FileList:
    """Return the list of a packed directory, or what its pipeline's says of a component.

    Raises:
        CheckpointError: no list, a damaged one, or one of another version.
    """
    if (folder / FILE_LIST).is_file():
        return FileList(folder, _read(folder / FILE_LIST))
    whole = folder.parent / FILE_LIST
    if not (folder.parent / "model_index.json").is_file() or not whole.is_file():
        # Without it, another config or VAE would load as readily as the one that was packed.
        raise CheckpointError(
            f"{folder}: no {FILE_LIST}, which says what the files must be; download it too, or "
            "pack the model again: 'quantkit pack MODEL -o NEW'"
        )
    prefix = f"{folder.name}/"
    mine = {n.removeprefix(prefix): r for n, r in _read(whole).items() if n.startswith(prefix)}
    return FileList(folder, mine)


def write_file_list(folder: Path, digests: Mapping[Path, str], packed: Collection[Path]) -> None:
    """Write the list of a directory whose files are all there.

    Args:
        folder: the directory.
        digests: SHA-256 of whole files, by relative path; others are read.
        packed: the packed weight files, relative: their headers alone are hashed.
    """
    files = [file for file in list_files(folder) if file.name not in MADE]
    for path in folder.glob(f"*/{FILE_LIST}"):
        # Of a component that was saved alone: this list says all that it says.
        path.unlink()
    _write(folder, _entries(folder, files, digests, packed))


def update_file_list(folder: Path, files: Collection[Path], packed: Collection[Path]) -> None:
    """Write the list of a component that was saved, or correct that of its pipeline.

    Args:
        folder: the component.
        files: what was written, relative to it.
        packed: those of them that are packed weights.
    """
    entries = _entries(folder, files, {}, packed)
    if not (folder.parent / FILE_LIST).is_file():
        _write(folder, entries)
        return
    others = {
        name: _to_json(record)
        for name, record in _read(folder.parent / FILE_LIST).items()
        if not name.startswith(f"{folder.name}/")
    }
    mine = {f"{folder.name}/{name}": entry for name, entry in entries.items()}
    _write(folder.parent, others | mine)


def _entries(
    folder: Path, files: Iterable[Path], digests: Mapping[Path, str], packed: Collection[Path]
) -> dict[str, Any]:
    table = {}
    for file in files:
        path = folder / file
        only_header = file in packed
        found = _header_digest(path) if only_header else digests.get(file) or sha256_of_file(path)
        record = FileRecord(path.stat().st_size, found, only_header)
        table[file.as_posix()] = _to_json(record)
    return table


def _to_json(record: FileRecord) -> dict[str, Any]:
    key = "header_sha256" if record.header_only else "sha256"
    return {"size": record.size, key: record.sha256}


def _write(folder: Path, entries: Mapping[str, Any]) -> None:
    value = {"schema": SCHEMA, "schema_version": VERSION, "files": entries}
    with rewritten_file(folder / FILE_LIST) as stage:
        stage.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def header_bytes(path: Path) -> int:
    """Return how many bytes of a safetensors file precede its data; at most its size."""
    with open_file(path, error=CheckpointError) as file:
        length = int.from_bytes(file.read(8), "little")
        return min(8 + length, os.fstat(file.fileno()).st_size)


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(8)
        return sha256(length + file.read(int.from_bytes(length, "little"))).hexdigest()


def _read(path: Path) -> dict[str, FileRecord]:
    values = read_json(path, error=CheckpointError, cure=_CURE)
    if values.get("schema") != SCHEMA or values.get("schema_version") != VERSION:
        found = f"{values.get('schema')!r:.40} {values.get('schema_version')!r:.20}"
        raise CheckpointError(f"{path}: found {found}, expected {SCHEMA!r} {VERSION}; {_CURE}")
    try:
        return {_name(name): _record(entry) for name, entry in values["files"].items()}
    except DAMAGE as error:
        raise CheckpointError(f"{path}: damaged ({short(error)}); {_CURE}") from error


def _name(name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or name.startswith("/") or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r:.80} is no path inside the directory")
    if path.as_posix() != name:
        # Else one file could stand there twice.
        raise ValueError(f"{name!r:.80} is not as short as it can be")
    if path.name in (FILE_LIST, MARKER):
        raise ValueError(f"{name!r:.80} is no part of the model")
    return name


def _record(entry: dict[str, Any]) -> FileRecord:
    match entry:
        case {"size": int(size), "sha256": str(digest), **rest}:
            header_only = False
        case {"size": int(size), "header_sha256": str(digest), **rest}:
            header_only = True
        case _:
            raise ValueError(f"entry {entry!r:.120}")
    if rest or isinstance(size, bool) or size < 0 or not is_digest(digest):
        raise ValueError(f"entry {entry!r:.120}")
    return FileRecord(size, digest, header_only)
