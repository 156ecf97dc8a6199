"""Differences between operating systems: Windows has no owners, pread or folders to sync.

Files that are read and written at offsets are opened here: Windows changes the ends of lines in
what is not opened as binary.
"""

import os
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Where there is none, the operating system needs none, or has no word for it.
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
#: A link is not followed.
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
#: A named pipe without a writer does not block.
NONBLOCK = getattr(os, "O_NONBLOCK", 0)

#: The mode's bit that lets every user write.
OTHERS_WRITE = 0o002

#: Of linux/fs.h: start the disk, and do not wait for it.
_SYNC_FILE_RANGE_WRITE = 2

#: For systems without pread and pwrite, where a descriptor has one position for all threads.
_POSITION = threading.Lock()


def open_to_read(path: str | Path, flags: int = 0) -> int:
    """Return a descriptor of a file that exists.

    Raises:
        OSError: as ``os.open``.
    """
    return os.open(path, os.O_RDONLY | _BINARY | flags)


def open_new(path: str | Path) -> int:
    """Return a descriptor of a file that is made, to write.

    Raises:
        FileExistsError: there is one.
        OSError: as ``os.open``.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o644)


def open_lock(path: Path) -> int:
    """Return a descriptor of a file to lock, which is made where there is none.

    Raises:
        OSError: as ``os.open``, a link included.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW | _BINARY, 0o600)


def read_into(descriptor: int, buffer: memoryview | bytearray, position: int) -> int:
    """Fill a buffer from an offset; return how many bytes there were, which may be fewer."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], position)
    data = read_at(descriptor, len(buffer), position)
    memoryview(buffer)[: len(data)] = data
    return len(data)


def read_at(descriptor: int, count: int, position: int) -> bytes:
    """Return the bytes at an offset; fewer where the file ends before."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, position)
    with _POSITION:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, count)


def write_at(descriptor: int, data: memoryview | bytes, position: int) -> None:
    """Write all of ``data`` at an offset; one call of the system may take only a part."""
    rest = memoryview(data)
    while rest:
        count = _write_some(descriptor, rest, position)
        rest, position = rest[count:], position + count


def _write_some(descriptor: int, data: memoryview, position: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, position)
    with _POSITION:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.write(descriptor, data)


def start_writing(descriptor: int, position: int, count: int) -> None:
    """Let the disk begin with what was written, so that ``sync`` at the end has little to wait for.

    A hint: nothing is promised, and systems without it (all but Linux) do it in their own time.
    """
    function = _sync_file_range()
    if function is not None and count:
        function(descriptor, position, count, _SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=1)
def _sync_file_range() -> "Callable[..., int] | None":
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk; Windows cannot open folders.

    Raises:
        OSError: the disk failed.
    """
    if os.name == "nt" and path.is_dir():
        return
    # Windows syncs what is open to write alone.
    flags = os.O_RDWR if os.name == "nt" else os.O_RDONLY
    descriptor = os.open(path, flags | _BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing; not everybody may write in them.

    Raises:
        OSError: as ``Path.mkdir``.
    """
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(0o777 & ~OTHERS_WRITE, exist_ok=True)


def is_mine(found: os.stat_result) -> bool:
    """Return whether what was found belongs to this user; True where files have no owners."""
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


def is_writable_by_others(found: os.stat_result) -> bool:
    """Return whether others may write it, by its mode; False where modes say nothing of others."""
    return hasattr(os, "geteuid") and bool(found.st_mode & 0o022)


def cores() -> int:
    """Return how many cores this process may use."""
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
