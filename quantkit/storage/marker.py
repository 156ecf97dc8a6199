"""The marker file that lists quantkit's files in a folder: ``--force`` deletes nothing else."""

import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from quantkit._version import __version__
from quantkit.errors import OutputError
from quantkit.storage.inputfile import KINDS
from quantkit.storage.jsonfile import read_json
from quantkit.storage.staging import is_stage

MARKER = ".quantkit"
_SCHEMA = "quantkit.output"
_VERSION = 1
_FOREIGN = "which quantkit did not write"
#: Entries that a message names.
_NAMED = 3
_WORDS = {**KINDS, stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}


def marker_text(folder: Path, kind: str, later: Collection[str] = ()) -> str:
    """Return the marker of a folder as it is now.

    Args:
        folder: all that is in it counts as written by quantkit.
        kind: what it is, as "packed model".
        later: files that will be added, relative to the folder.
    """
    names = {_plain(name) for name in _unlisted(folder, "", frozenset({MARKER}))}
    marker = {
        "schema": _SCHEMA,
        "schema_version": _VERSION,
        "quantkit": __version__,
        "kind": kind,
        "files": sorted(names | set(later)),
    }
    return json.dumps(marker, indent=1) + "\n"


def refuse_foreign(folder: Path, kind: str, *, output: Path) -> None:
    """Refuse to replace anything but an empty folder, and one of a kind that quantkit wrote.

    Args:
        folder: what would be deleted.
        kind: of its successor.
        output: what to call it in the message.

    Raises:
        OutputError: it is no folder, or holds a file that quantkit did not write.
    """
    what = describe(folder)
    if what != "a folder":
        raise OutputError(f"{output}: {what}, expected a folder; choose another path")
    with os.scandir(folder) as entries:
        first = sorted(entry.name for entry in islice(entries, _NAMED + 1))
    if not first:
        return
    marker = _read(folder)
    if marker is None:
        damaged = os.path.lexists(folder / MARKER)
        why = "and no sound .quantkit that says what wrote it" if damaged else _FOREIGN
        raise OutputError(_refusal(output, first, why))
    if marker["kind"] != kind:
        raise OutputError(
            f"{output}: holds a {marker['kind']}, and force only replaces it with another {kind}; "
            "delete it, or choose another path"
        )
    foreign = list(islice(_unlisted(folder, "", _listed(folder, "")), _NAMED + 1))
    if foreign:
        raise OutputError(_refusal(output, foreign, _FOREIGN))


def describe(path: Path) -> str:
    """Return what lies at a path, links not followed: "a folder", "a link", "a device"."""
    return _WORDS[stat.S_IFMT(path.lstat().st_mode)]


def _refusal(output: Path, names: list[str], why: str) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return (
        f"{output}: holds {', '.join(names[:_NAMED])}{more}, {why}; force would delete it: move it "
        "away, or choose another path"
    )


def _read(folder: Path) -> Mapping[str, Any] | None:
    """Return a folder's marker; None: there is none, or it is not what quantkit writes."""
    path = folder / MARKER
    if path.is_symlink():
        return None
    try:
        marker = read_json(path, error=OutputError)
    except OutputError:
        return None
    sound = (
        marker.get("schema") == _SCHEMA
        and marker.get("schema_version") == _VERSION
        and isinstance(marker.get("kind"), str)
        and isinstance(marker.get("files"), list)
    )
    return marker if sound else None


def _listed(folder: Path, below: str) -> frozenset[str]:
    """Return what a folder's marker lists, and the marker, after ``below``; nothing without one."""
    marker = _read(folder)
    if marker is None:
        return frozenset()
    return frozenset(f"{below}{name}" for name in (MARKER, *marker["files"]))


def _unlisted(folder: Path, below: str, listed: frozenset[str]) -> Iterator[str]:
    """Yield the files that are not listed, neither there nor in the marker of a folder inside."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name, path = f"{below}{entry.name}", Path(entry.path)
        if not entry.is_dir(follow_symlinks=False):
            if _plain(name) not in listed:
                yield name
        elif not is_stage(Path(entry.name)):
            inner = f"{name}/"
            yield from _unlisted(path, inner, listed | _listed(path, _plain(inner)))


def _plain(name: str) -> str:
    """Return a name as JSON text can hold it, bytes that are not UTF-8 included."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
