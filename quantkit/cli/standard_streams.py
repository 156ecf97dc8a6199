"""Preparing the standard streams, of which some may be closed, and the umask."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAMES = ("stdin", "stdout", "stderr")


def open_streams() -> None:
    """Redirect streams that are closed, or open for reading only, to the null device.

    Else the next file that is opened would get its number, and what is printed.
    """
    for number, name in enumerate(_NAMES):
        if not _is_open(number):
            _send_nowhere(number)
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open("w" if number else "r", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a letter shows its number.
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Discard buffered output, or Python would complain at exit."""
    with suppress(OSError, ValueError, io.UnsupportedOperation):
        _send_nowhere(sys.stdout.fileno())


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Keep files and folders that the body makes from being writable for all users."""
    before = os.umask(0o022)
    os.umask(before | 0o002)
    try:
        yield
    finally:
        os.umask(before)


def _is_open(number: int) -> bool:
    try:
        if number:
            os.write(number, b"")
        else:
            os.fstat(number)
    except OSError as error:
        return error.errno != errno.EBADF
    return True


def _send_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)
