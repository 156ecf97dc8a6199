"""Where compiled kernels are kept: one folder per sources, compiler, options and machine.

Folders that were not used for longest are deleted when all of them together outgrow the limit.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from quantkit.errors import KernelError
from quantkit.resources import kernel_sources

#: Bytes of all build folders. Every variant for the host and one GPU takes about 60 MB, so this
#: holds the builds of some ten versions.
_LIMIT = 512 * 2**20
_LIMIT_VARIABLE = "QUANTKIT_CACHE_MB"


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/quantkit, or ~/.cache/quantkit."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "quantkit"


def cache_limit() -> int:
    """Return how many bytes the build folders may take: $QUANTKIT_CACHE_MB, else 512 MB.

    Raises:
        KernelError: the variable is not a whole number.
    """
    text = os.environ.get(_LIMIT_VARIABLE, "").strip()
    if not text:
        return _LIMIT
    if not text.isdecimal():
        raise KernelError(f"{_LIMIT_VARIABLE}={text!r}: wanted a whole number of megabytes")
    return int(text) * 2**20


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Return the SHA-256 over every kernel source, its path included."""
    return _digest({".hip", ".h", ".cpp"}, skip="")


@lru_cache(maxsize=1)
def device_sources_digest() -> str:
    """Return the SHA-256 over what GPU objects are compiled from: all but the host's runtime."""
    return _digest({".hip", ".h"}, skip="host")


def build_folder(*parts: str) -> Path:
    """Return the folder for kernels built from today's sources and from ``parts``; made if missing.

    Raises:
        KernelError: it cannot be made or written.
    """
    key = hashlib.sha256("\0".join((sources_digest(), *parts)).encode()).hexdigest()
    folder = _builds() / key[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise KernelError(f"{folder}: cannot be made ({error}); set XDG_CACHE_HOME") from error
    if not writable:
        raise KernelError(f"{folder}: cannot be written; set XDG_CACHE_HOME to a folder that can")
    # The time of last use, which decides what is deleted first.
    os.utime(folder)
    return folder


@contextmanager
def building(target: Path) -> Iterator[Path | None]:
    """Yield a path to build ``target`` at, or None when another process has just built it.

    The lock only saves double work; the rename is what keeps a reader from half a file.
    """
    # Another process may have deleted a folder that this one has not used for long.
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        stage = target.with_name(f".{os.getpid()}.{target.name}")
        try:
            yield stage
            stage.replace(target)
        finally:
            stage.unlink(missing_ok=True)
    _prune_once(target.parent)


def prune(keep: Path, limit: int) -> tuple[Path, ...]:
    """Delete the build folders not used for longest until the rest fits.

    Args:
        keep: the folder in use, which stays.
        limit: bytes that may remain.

    Returns:
        the folders deleted. Libraries that a process has open live on until it ends.
    """
    folders = sorted((_used(path), path) for path in _builds().glob("*") if path.is_dir())
    sizes = {path: folder_bytes(path) for _, path in folders}
    total, deleted = sum(sizes.values()), []
    for _, path in folders:
        if total <= limit:
            break
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)
            total -= sizes[path]
            deleted.append(path)
    return tuple(deleted)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files under ``folder``; 0 when there is none."""
    return sum(_sizes(folder.rglob("*")))


@lru_cache(maxsize=1)
def _prune_once(keep: Path) -> None:
    # A process builds a few megabytes at most: looking once bounds the cache well enough.
    prune(keep, cache_limit())


def _builds() -> Path:
    return cache_directory() / "kernels"


def _used(path: Path) -> float:
    # Another process may delete it meanwhile.
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _sizes(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        with suppress(OSError):
            yield path.stat().st_size if path.is_file() else 0


def _digest(suffixes: set[str], *, skip: str) -> str:
    digest = hashlib.sha256()
    folder = kernel_sources()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in suffixes):
        name = path.relative_to(folder)
        if skip and name.parts[0] == skip:
            continue
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()
