"""The cache of compiled kernels: one folder per sources, compiler, options and machine.

The least recently used folders are deleted when all of them together exceed the limit.

Files here are loaded as code, so no other user may write them: folders belong to the user, with
mode 0700, and no link is followed in them.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from filelock import lock_descriptor

from quantkit.errors import KernelError
from quantkit.resources import kernel_sources
from quantkit.storage.system import (
    NOFOLLOW,
    NONBLOCK,
    is_mine,
    is_writable_by_others,
    open_lock,
    open_to_read,
    sync,
)

#: Bytes of all build folders. Every variant for the host and one GPU takes about 60 MB, so this
#: holds the builds of some ten versions.
_LIMIT = 512 * 2**20
_LIMIT_VARIABLE = "QUANTKIT_CACHE_MB"
#: Bytes of the SHA-256 behind a kept file: one that was cut short must not be mapped as code.
_SEAL = 32


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
        raise KernelError(f"{_LIMIT_VARIABLE}={text!r}: expected a whole number of megabytes")
    return int(text) * 2**20


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Return the SHA-256 over every kernel source and launch.json, paths included."""
    return _digest({".hip", ".h", ".cpp", ".json"}, skip="")


@lru_cache(maxsize=1)
def device_sources_digest() -> str:
    """Return the SHA-256 over what GPU objects are compiled from: all but the host's runtime."""
    return _digest({".hip", ".h", ".json"}, skip="host")


def build_folder(*parts: str) -> Path:
    """Return the folder for kernels built from today's sources and from ``parts``; made if missing.

    Raises:
        KernelError: it cannot be made or written.
    """
    key = hashlib.sha256("\0".join((sources_digest(), *parts)).encode()).hexdigest()
    folder = _builds() / key[:24]
    _make_private(folder)
    # The time of last use, which decides what is deleted first.
    os.utime(folder)
    return folder


def read_whole(path: Path) -> bytes | None:
    """Return what was built at ``path``; None unless it is all there, a plain file, and ours."""
    try:
        descriptor = open_to_read(path, NOFOLLOW | NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not (stat.S_ISREG(found.st_mode) and _is_private(found)):
            return None
        content = file.read()
    body, seal = content[:-_SEAL], content[-_SEAL:]
    return body if seal == hashlib.sha256(body).digest() else None


def why_not_private(folder: Path) -> str:
    """Return why what lies in ``folder`` must not be run; empty when only this user writes it.

    Raises:
        OSError: it cannot be looked at.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is a link or a file"
    if not is_mine(found):
        return "belongs to another user"
    return "" if _is_private(found) else "can be written by others"


@contextmanager
def building(target: Path) -> Iterator[Path | None]:
    """Yield a path to build ``target`` at, or None when another process has just built it.

    The lock only saves double work; the rename is what keeps a reader from half a file.
    """
    # Another process may have deleted a folder that this one has not used for long.
    _make_private(target.parent)
    with _locked(target.parent / f"{target.name}.lock"):
        if read_whole(target) is not None:
            yield None
            return
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield stage / target.name
            _keep(stage / target.name, target)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    _prune_once(target.parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Truncating nothing and following no link: what a link points to is not ours to touch.
    try:
        descriptor = open_lock(path)
    except OSError as error:
        raise KernelError(f"{path}: cannot be locked ({error.strerror}); delete it") from error
    try:
        # Without locks in the file system work is done twice, and no harm.
        with suppress(OSError):
            lock_descriptor(descriptor)
        yield
    finally:
        os.close(descriptor)


def _keep(built: Path, target: Path) -> None:
    """Put a built file in its place; whole, even if the machine stops."""
    with built.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        # Behind the end, where neither linkers nor loaders look: one file needs no second rename.
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
    built.chmod(0o700)
    try:
        built.replace(target)
    except PermissionError:
        # Windows replaces nothing that a process has open; what it has open is whole.
        if read_whole(target) is None:
            raise
    sync(target.parent)


def _make_private(folder: Path) -> None:
    """Make a folder of the cache, and those above it, which nobody else can write.

    Raises:
        KernelError: it cannot be made or written, or is a link, another user's, or open to others.
    """
    root = cache_directory()
    between = [path for path in folder.parents if root in path.parents]
    for path in (root, *reversed(between), folder):
        try:
            path.mkdir(mode=0o700, parents=path == root, exist_ok=True)
            problem, writable = why_not_private(path), os.access(path, os.W_OK)
        except OSError as error:
            raise KernelError(f"{path}: cannot be made ({error}); set XDG_CACHE_HOME") from error
        if problem:
            raise KernelError(
                f"{path}: {problem}, and kernels in it would be run; delete it or set "
                "XDG_CACHE_HOME"
            )
        if not writable:
            raise KernelError(f"{path}: cannot be written; set XDG_CACHE_HOME to a folder that can")


def _is_private(found: os.stat_result) -> bool:
    return is_mine(found) and not is_writable_by_others(found)


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
