"""Listing and deleting entries of quantkit's cache."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.device.cache import cache_directory
from quantkit.errors import InputError, OutputError
from quantkit.workflow.single_file import SINGLE_FILES

#: The folders of the cache. What is deleted there is made again when it is needed.
CACHES = ("kernels", SINGLE_FILES)


@dataclass(frozen=True)
class CacheEntry:
    """One entry of a cache: a build of kernels, or a single file as a 16-bit pipeline."""

    #: one of CACHES
    cache: str
    path: Path
    #: of files that are not linked from elsewhere
    nbytes: int
    #: when it was made, or a single file was last opened: seconds since 1970
    used: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"cache": self.cache, "path": str(self.path), "bytes": self.nbytes}


def list_cache() -> tuple[CacheEntry, ...]:
    """Return the entries of the cache, the largest first."""
    found = [
        CacheEntry(cache, path, _bytes_of(path), path.stat().st_mtime)
        for cache in CACHES
        for path in sorted((cache_directory() / cache).glob("*"))
        if path.is_dir() and not path.is_symlink()
    ]
    return tuple(sorted(found, key=lambda kept: -kept.nbytes))


def delete_from_cache(names: Sequence[str]) -> tuple[CacheEntry, ...]:
    """Delete entries of the cache, which commands that run keep reading until they end.

    Args:
        names: of entries, as ``list_cache`` has them, or of whole caches.

    Returns:
        what was deleted.

    Raises:
        InputError: a name that is neither.
        OutputError: one that cannot be deleted.
    """
    there = list_cache()
    for name in names:
        if name not in CACHES and name not in {kept.path.name for kept in there}:
            raise InputError(
                f"{name!r:.200}: not in {cache_directory()}; expected one of {', '.join(CACHES)}, "
                "or a name that 'quantkit cache' shows"
            )
    chosen = tuple(kept for kept in there if {kept.cache, kept.path.name} & set(names))
    for kept in chosen:
        _delete(kept.path)
    return chosen


def shrink_cache(most: int) -> tuple[CacheEntry, ...]:
    """Delete single files from the cache, the least recently opened first.

    Nothing does so by itself: what another command is reading would go, too.

    Args:
        most: bytes that single files may take.

    Returns:
        what was deleted.

    Raises:
        OutputError: one that cannot be deleted.
    """
    there = [kept for kept in list_cache() if kept.cache == SINGLE_FILES]
    size, deleted = sum(kept.nbytes for kept in there), []
    for kept in sorted(there, key=lambda kept: kept.used):
        if size <= most:
            break
        _delete(kept.path)
        size -= kept.nbytes
        deleted.append(kept)
    return tuple(deleted)


def cache_place() -> Path:
    """Return the folder of the cache."""
    return cache_directory()


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be deleted ({error.strerror})") from error


def _bytes_of(folder: Path) -> int:
    stats = (path.lstat() for path in folder.rglob("*") if path.is_file())
    return sum(found.st_size for found in stats if found.st_nlink == 1)
