"""Where compiled host kernels are kept: one folder per sources, compiler, flags and CPU."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from quantkit.errors import KernelError
from quantkit.resources import kernel_sources


def cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/quantkit, or ~/.cache/quantkit."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "quantkit"


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Return the SHA-256 over every kernel source, its path included."""
    digest = hashlib.sha256()
    folder = kernel_sources()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".hip", ".h", ".cpp"}):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def build_folder(*parts: str) -> Path:
    """Return the folder for kernels built from today's sources and from ``parts``; made if missing.

    Raises:
        KernelError: it cannot be made or written.
    """
    key = hashlib.sha256("\0".join((sources_digest(), *parts)).encode()).hexdigest()
    folder = cache_directory() / "kernels" / key[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise KernelError(f"{folder}: cannot be made ({error}); set XDG_CACHE_HOME") from error
    if not writable:
        raise KernelError(f"{folder}: cannot be written; set XDG_CACHE_HOME to a folder that can")
    return folder


@contextmanager
def building(target: Path) -> Iterator[Path | None]:
    """Yield a path to build ``target`` at, or None when another process has just built it.

    The lock only saves double work; the rename is what keeps a reader from half a file.
    """
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
