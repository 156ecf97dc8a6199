"""Checks of an output path before long work: what is there, and can it be written?"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from quantkit.errors import OutputError
from quantkit.storage.marker import describe, refuse_foreign
from quantkit.storage.sizes import tell_bytes
from quantkit.storage.staging import is_stage
from quantkit.storage.written import refuse_foreign_file

#: What the system says when there is no room.
_FULL = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "larger than a file may be here (see 'ulimit -f')",
}
#: The same through the safetensors library, which writes by itself.
_CODE = re.compile(r"\(os error (\d+)\)")
#: Bytes of the trial: a full disk may still have room for an empty file.
_TRIAL = 4096


def check_directory(output: Path, *, kind: str, force: bool) -> None:
    """Refuse a folder that could not be written, so that long work need not end in that error.

    Raises:
        OutputError: as ``staged_directory``.
    """
    refuse_directory(output, kind, force=force)
    _try_place(output)


def check_file(output: Path, *, force: bool) -> None:
    """Refuse a file that could not be written, so that long work need not end in that error.

    Raises:
        OutputError: as ``staged_file``.
    """
    refuse_file(output, force=force)
    _try_place(output)


def check_room(output: Path, nbytes: int) -> None:
    """Refuse an output that its file system has no room for.

    Args:
        output: what will be made.
        nbytes: of all its files.

    Raises:
        OutputError: with both sizes.
    """
    free = shutil.disk_usage(_nearest(output)).free
    if free < nbytes:
        raise OutputError(
            f"{output}: {tell_bytes(free)} free, expected {tell_bytes(nbytes)}; free some or "
            "choose another path"
        )


def refuse_overlap(output: Path, source: Path) -> None:
    """Refuse an output that is its own source, above it or in it.

    Raises:
        OutputError: naming both.
    """
    first, second = Path(os.path.realpath(source)), Path(os.path.realpath(output))
    if first == second or first in second.parents or second in first.parents:
        raise OutputError(f"{output}: overlaps the input {source}; choose another path")


def refuse_directory(output: Path, kind: str, *, force: bool) -> None:
    """Refuse a folder that must not be written, as ``check_directory``, without trying."""
    _refuse_existing(output, force=force)
    with translated(output):
        while (seen := _identity(output)) is not None:
            try:
                refuse_foreign(output, kind, output=output)
            except (OutputError, FileNotFoundError):
                # Half of one and half of its successor may have been looked at.
                if _identity(output) != seen:
                    continue
                raise
            return


def refuse_file(output: Path, *, force: bool) -> None:
    """Refuse a file that must not be written, as ``check_file``, without trying."""
    _refuse_existing(output, force=force)
    with translated(output):
        if not os.path.lexists(output):
            return
        what = describe(output)
        if what != "a file":
            raise OutputError(f"{output}: {what}, expected a file; choose another path")
        refuse_foreign_file(output)


def already_there(output: Path) -> OutputError:
    """Return the error of an output that exists."""
    return OutputError(
        f"{output}: exists already; set force to replace it, or choose another path",
        fields=("force",),
    )


@contextmanager
def translated(output: Path) -> Iterator[None]:
    """Say in one line why an output cannot be written; errors about other files stay."""
    try:
        yield
    except SafetensorError as error:
        code = _CODE.search(str(error))
        if code is None:
            raise
        raise _unwritable(output, OSError(int(code[1]), os.strerror(int(code[1])))) from error
    except OSError as error:
        if error.errno not in _FULL and not _concerns(error, output):
            raise
        raise _unwritable(output, error) from error


def _refuse_existing(output: Path, *, force: bool) -> None:
    here, place = Path.cwd(), Path(os.path.realpath(output))
    if place == here or place in here.parents:
        raise OutputError(
            f"{output}: the folder that you are in, or one above it; choose another path"
        )
    with translated(output):
        there = _identity(output) is not None
    if there and not force:
        raise already_there(output)


def _identity(output: Path) -> tuple[int, int, int] | None:
    """Return the identity of a folder, to detect a replacement; None: there is none."""
    try:
        found = output.lstat()
    except FileNotFoundError:
        return None
    # The number of a deleted folder is soon another's: the time of the last change differs.
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _try_place(output: Path) -> None:
    """Write and drop a few bytes in the nearest folder above that exists."""
    try:
        with tempfile.TemporaryFile(dir=_nearest(output)) as file:
            file.write(bytes(_TRIAL))
    except OSError as error:
        raise _unwritable(output, error) from error


def _nearest(output: Path) -> Path:
    """Return the nearest folder above an output that exists."""
    return next(path for path in output.absolute().parents if os.path.lexists(path))


def _unwritable(output: Path, error: OSError) -> OutputError:
    if error.errno in _FULL:
        return OutputError(f"{output}: {_FULL[error.errno]}; free some or choose another path")
    return OutputError(
        f"{output}: cannot be written ({error.strerror}); choose another path, or mend its folder"
    )


def _concerns(error: OSError, output: Path) -> bool:
    if not isinstance(error.filename, str | bytes):
        # As write() says it, which knows no name.
        return error.filename is None and error.errno in {errno.EROFS, errno.EIO, errno.EPERM}
    path, place = Path(os.fsdecode(error.filename)).absolute(), output.absolute()
    return path == place or path in place.parents or is_stage(path)
