"""Running the command line in this process, and keeping all it prints: Python's and C's output."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from quantkit import cli

_STREAMS = ((0, "stdin"), (1, "stdout"), (2, "stderr"))


@cli.quantkit.command("read-baseline", hidden=True)
@click.argument("path", type=click.Path(path_type=Path))
def _read_baseline(path: Path) -> None:
    """Read a baseline; 'kernels bench --compare' would measure, too."""
    from quantkit.bench.kernels.kernel_figures import load_baseline

    load_baseline(path)


@cli.quantkit.command("read-shapes", hidden=True)
@click.argument("path")
def _read_shapes(path: str) -> None:
    """Read a file of shapes; 'kernels bench --shapes' would measure, too."""
    from quantkit.bench.kernels.kernel_shapes import find_shapes

    find_shapes(path)


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    arguments: tuple[str, ...]
    #: as the shell sees it; 1 after an exception that nobody caught
    code: int
    out: str
    err: str
    #: the traceback that a user would have read; "" when there was none
    escaped: str = ""
    #: the class of what escaped
    raised: type[BaseException] | None = None


def run(arguments: Sequence[str], *, closed: Sequence[int] = ()) -> Ran:
    """Run ``quantkit`` with these arguments as a user would, some of its streams closed."""
    escaped, raised = "", None
    with _captured() as read, _without(closed):
        try:
            cli.main(list(arguments))
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException as error:  # noqa: BLE001  whatever a user would see
            code, escaped, raised = 1, told(error), type(error)
        out, err = read()
    return Ran(tuple(arguments), code, out, err, escaped, raised)


@contextmanager
def _without(closed: Sequence[int]) -> Iterator[None]:
    """Close streams, as a shell does, and open them again."""
    before = [(n, os.dup(n), name, getattr(sys, name)) for n, name in _STREAMS if n in closed]
    for number, _, name, _ in before:
        os.close(number)
        setattr(sys, name, None)
    try:
        yield
    finally:
        for number, descriptor, name, stream in before:
            os.dup2(descriptor, number)
            os.close(descriptor)
            setattr(sys, name, stream)


def told(error: BaseException) -> str:
    """Return a traceback, the end of a long one."""
    return "".join(traceback.format_exception(error))[-4000:]


@contextmanager
def _captured() -> Iterator[Callable[[], tuple[str, str]]]:
    """Send what is written to descriptors 1 and 2 to files, and yield what reads them."""
    saved = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def read() -> tuple[str, str]:
            _flush()
            return _text(out), _text(err)

        _flush()
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            yield read
        finally:
            _flush()
            for place, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, place)
                os.close(descriptor)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(1 << 20).decode(errors="replace")
