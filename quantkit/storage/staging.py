"""Staging folders next to an output, and removing those of processes that died.

Every stage has a file that its process locks, so that the next process can tell an abandoned
stage from one in use. Where the file system has no such locks, abandoned stages stay.
"""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from quantkit.storage.renaming import locked
from quantkit.storage.system import is_mine, make_folders, open_lock

_SUFFIX = ".quantkit-stage"
#: Letters of the output's name in the stage's: a name has 255 bytes at most.
_NAME = 50
#: Inside the stage: the place of an output while its successor takes the name.
_ASIDE = "aside"
#: Inside the stage: the file that its process locks.
_LOCK = ".lock"


@contextmanager
def stage_for(output: Path) -> Iterator[Path]:
    """Yield an empty folder next to ``output``, on its file system; it is removed afterwards.

    Stages that killed processes left for the same output are deleted first.

    Raises:
        OSError: it cannot be made.
    """
    make_folders(output.parent)
    _clean(output)
    stage, lock = _make(output)
    try:
        yield stage
    finally:
        _drop(stage, lock)


def aside_of(stage: Path, output: Path) -> Path:
    """Return where ``output`` waits in a stage; it is given back if nothing takes its place."""
    folder = stage / _ASIDE
    folder.mkdir(exist_ok=True)
    return folder / output.name


def is_stage(path: Path) -> bool:
    """Tell whether the path is a stage, or inside of one, by its name."""
    return any(part.endswith(_SUFFIX) for part in path.parts)


def _make(output: Path) -> tuple[Path, int | None]:
    while True:
        stage = Path(tempfile.mkdtemp(prefix=_prefix(output), suffix=_SUFFIX, dir=output.parent))
        try:
            lock = _lock(stage)
        except OSError:
            return stage, None
        # None: somebody who cleans up took it for dead before it was locked.
        if lock is not None:
            return stage, lock


def _clean(output: Path) -> None:
    """Delete the stages of processes that are gone."""
    name = re.compile(rf"{re.escape(_prefix(output))}\w{{8}}{re.escape(_SUFFIX)}")
    for stage in [path for path in output.parent.iterdir() if name.fullmatch(path.name)]:
        # One that cannot be locked or opened, or that is another user's, stays.
        with suppress(OSError):
            found = stage.lstat()
            if not (stat.S_ISDIR(found.st_mode) and is_mine(found)):
                continue
            lock = _lock(stage)
            if lock is not None:
                _drop(stage, lock)


def _drop(stage: Path, lock: int | None) -> None:
    """Delete a stage, after an output that waits in it took its place again, and unlock it."""
    with suppress(OSError):
        for waiting in (stage / _ASIDE).iterdir():
            target = stage.parent / waiting.name
            # Another one may be between its two renames, when nothing has the name.
            with locked(target):
                if not os.path.lexists(target):
                    waiting.rename(target)
    # Windows deletes nothing that is open. Elsewhere a lock that is let go before would be taken by
    # a process that has just made the stage and is about to lock it.
    if os.name == "nt" and lock is not None:
        os.close(lock)
    shutil.rmtree(stage, ignore_errors=True)
    if os.name != "nt" and lock is not None:
        os.close(lock)


def _lock(stage: Path) -> int | None:
    """Return a descriptor that holds the stage's lock; None: it is locked or gone.

    Raises:
        OSError: the file system has no such locks.
    """
    path = stage / _LOCK
    try:
        descriptor = open_lock(path)
    except FileNotFoundError:
        return None
    try:
        if lock_descriptor(descriptor, blocking=False) and os.path.samestat(
            os.fstat(descriptor), path.lstat()
        ):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _prefix(output: Path) -> str:
    return f".{output.name[:_NAME]}."
