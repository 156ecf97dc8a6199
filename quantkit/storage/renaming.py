"""Atomic renaming of finished outputs, safe against other processes that do the same.

Linux's renameat2 does it. Where the C library or the file system has none, a hard link gives a file
its name, and a folder gets it under a lock in the same directory.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from filelock import lock_descriptor

from quantkit.storage.system import open_lock

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
#: Old kernels, and file systems such as NFS.
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
#: What link() says on file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or folder; of several that want the name at once, one gets it.

    Raises:
        FileExistsError: there is something of this name, a dangling link included.
    """
    if _rename(source, target, _NOREPLACE):
        return
    if not source.is_dir():
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            source.unlink()
            return
    with locked(target):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        source.rename(target)


def rename_over(source: Path, target: Path, aside: Path) -> Path | None:
    """Rename a folder, whether or not there is another of this name.

    Args:
        source: the folder.
        target: its name from now on.
        aside: where the other one may go, next to the source.

    Returns:
        where the other one is now; None: there was none.
    """
    while True:
        with suppress(FileExistsError):
            rename_new(source, target)
            return None
        try:
            return _exchange(source, target, aside)
        except FileNotFoundError:
            # Somebody else took it away meanwhile: its name is free.
            if not source.exists():
                raise


def _exchange(source: Path, target: Path, aside: Path) -> Path:
    if _rename(source, target, _EXCHANGE):
        return source
    with locked(target):
        target.rename(aside)
        try:
            source.rename(target)
        except OSError:
            aside.rename(target)
            raise
    return aside


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Call renameat2; False: there is none here."""
    function = _renameat2()
    if function is None:
        return False
    if not function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


@cache
def _renameat2() -> Callable[..., int] | None:
    if os.name == "nt":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        number, text = ctypes.c_int, ctypes.c_char_p
        function.argtypes = (number, text, number, text, ctypes.c_uint)
    return function


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold a lock next to a path; without locks in the file system, hold nothing."""
    path = target.parent / f".{target.name[:50]}.quantkit-lock"
    lock = _lock(path)
    try:
        yield
    finally:
        # While it is held: a waiting process sees that it is gone, and makes another. Windows
        # deletes nothing that is open: there the empty file stays.
        with suppress(PermissionError):
            path.unlink(missing_ok=True)
        os.close(lock)


def _lock(path: Path) -> int:
    while True:
        lock = open_lock(path)
        try:
            lock_descriptor(lock, poll_interval=0.01)
        except OSError:
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.lstat()):
                return lock
        os.close(lock)
