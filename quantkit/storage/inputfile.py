"""Reading a whole input file of limited size: never blocks, and reports a failure in one line."""

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import InputError, ModelError
from quantkit.storage.system import NONBLOCK, open_to_read

#: What is no file, in words.
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path, *, error: type[InputError] = ModelError) -> BinaryIO:
    """Open a regular file for reading; a named pipe would block and a device would never end.

    Args:
        path: the file, or a link to one.
        error: what to raise.

    Raises:
        InputError: of class ``error``: missing, not a regular file, or not readable.
    """
    try:
        # A named pipe without a writer blocks an ordinary open() for ever.
        descriptor = open_to_read(path, NONBLOCK)
    except (OSError, ValueError) as reason:
        raise error(f"{path}: {_why(path, reason)}") from reason
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise error(f"{path}: {KINDS[stat.S_IFMT(mode)]}, expected a file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, limit: int, *, error: type[InputError] = ModelError) -> bytes:
    """Return the bytes of a file.

    Args:
        path: the file.
        limit: the most bytes that it may have.
        error: what to raise.

    Raises:
        InputError: of class ``error``: larger, or as ``open_file`` says.
    """
    with open_file(path, error=error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise error(f"{path}: {size} bytes, expected at most {limit}; is it the right file?")
        try:
            # A file that grows meanwhile is cut at what it was.
            return file.read(size)
        except OSError as reason:
            raise error(f"{path}: cannot be read ({reason.strerror})") from reason


def read_text(path: Path, limit: int, *, error: type[InputError] = ModelError) -> str:
    """Return the text of a UTF-8 file, without the mark that some editors put first.

    Raises:
        InputError: of class ``error``: not UTF-8, or as ``read_file`` says.
    """
    data = read_file(path, limit, error=error)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise error(f"{path}: not UTF-8 (byte {reason.start}); save it as UTF-8") from reason


def split_lines(text: str) -> list[str]:
    r"""Return the lines of a text, which \n, \r\n and \r end: those that an editor shows.

    ``str.splitlines`` also ends a line at U+2028, U+0085, form feeds and five others, which texts
    that were copied from pages hold.

    >>> split_lines("a\u2028b\r\nc\rd\n")
    ['a\u2028b', 'c', 'd', '']
    """
    return io.StringIO(text, newline=None).read().split("\n")


def refuse_odd_files(folder: Path, *, error: type[InputError] = ModelError) -> None:
    """Refuse a folder with named pipes or devices, on which libraries that read it would wait.

    Raises:
        InputError: of class ``error``, naming the first.
    """
    for path in sorted(folder.rglob("*")):
        kind = _kind(path)
        if kind not in {stat.S_IFREG, stat.S_IFDIR}:
            raise error(f"{path}: {KINDS[kind]}, expected a file")


def _kind(path: Path) -> int:
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except OSError:
        # A link to what is missing: nothing that a library would wait for.
        return stat.S_IFREG


def _why(path: Path, reason: OSError | ValueError) -> str:
    if isinstance(reason, FileNotFoundError):
        return "a link to what is missing" if path.is_symlink() else "missing"
    if isinstance(reason, OSError):
        return f"cannot be read ({reason.strerror})"
    return f"no name of a file ({reason})"
