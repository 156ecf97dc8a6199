"""Writing so that nothing is ever half written: a temporary sibling, fsync, rename."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import OutputError

#: What the system says of a place that is not ours to write; EEXIST: a file where a folder must be.
_NOT_WRITABLE = {errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def staged_directory(output: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty sibling of ``output`` that becomes ``output`` when the body succeeds.

    Args:
        output: the directory to make; its parent is made when missing.
        force: replace an existing ``output``; it stays in place until the new one is complete.

    Raises:
        OutputError: ``output`` exists without ``force``, or cannot be written (no space left).
    """
    refuse_existing(output, force=force)
    with _translated(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        stage.chmod(0o755)
    try:
        with _translated(output):
            yield stage
            _sync(stage)
            _replace(stage, output)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def scratch_directory(output: Path) -> Iterator[Path]:
    """Yield an empty sibling of ``output``, on its file system, that is gone afterwards.

    Raises:
        OutputError: it cannot be written (no space left).
    """
    with _translated(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with _translated(output):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def staged_file(output: Path, *, force: bool) -> Iterator[Path]:
    """Yield a path beside ``output`` that becomes ``output`` when the body succeeds.

    Raises:
        OutputError: ``output`` exists without ``force``, or cannot be written.
    """
    refuse_existing(output, force=force)
    with _translated(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    stage = output.parent / f".{output.name}.{os.getpid()}"
    try:
        with _translated(output):
            yield stage
            # safetensors writes 0600; a file should be as readable as one made by open().
            stage.chmod(_plain_mode())
            _sync_file(stage)
            stage.replace(output)
            _sync_file(output.parent)
    finally:
        stage.unlink(missing_ok=True)


def refuse_existing(output: Path, *, force: bool) -> None:
    """Refuse an output that exists, so that long work need not end in that error.

    Raises:
        OutputError: ``output`` exists without ``force``.
    """
    if output.exists() and not force:
        raise OutputError(f"{output}: exists already; pass --force to replace it, or another path")


def _plain_mode() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


@contextmanager
def _translated(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OutputError(
                f"{output}: no space left on the device; free some or choose another path"
            ) from error
        if error.errno in _NOT_WRITABLE:
            raise OutputError(f"{output}: cannot be written ({error.strerror})") from error
        raise


def _replace(stage: Path, output: Path) -> None:
    if output.is_dir() and not output.is_symlink():
        # rename() cannot replace a full directory: step the old one aside, then drop it.
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
        output.replace(old)
        stage.replace(output)
        shutil.rmtree(old)
    else:
        stage.replace(output)
    _sync_file(output.parent)


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync_file(path)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
