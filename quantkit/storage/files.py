"""Atomic writes: nothing is left half written, and nothing that quantkit did not write is deleted.

An output is made in a stage next to it and gets its name in one step (see ``staging`` and
``renaming``). ``--force`` replaces a folder if its marker says that quantkit wrote all that is in
it, and a file if it has quantkit's mark (see ``written``).

Nothing gets a mode that lets all users write, whatever the umask: who may change a packed model may
change what it computes. The group's mode is the umask's: teams share folders with 002.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import OutputError, QuantkitError
from quantkit.storage.marker import MARKER, marker_text, refuse_foreign
from quantkit.storage.places import already_there, refuse_directory, refuse_file, translated
from quantkit.storage.renaming import rename_new, rename_over
from quantkit.storage.staging import aside_of, stage_for
from quantkit.storage.system import OTHERS_WRITE, sync


@contextmanager
def staged_directory(
    output: Path, *, kind: str, force: bool, later: Collection[str] = ()
) -> Iterator[Path]:
    """Yield an empty folder that becomes ``output`` when the body succeeds.

    Args:
        output: the directory to make; its parent is made when missing.
        kind: what it is, as "packed model"; the marker says so.
        force: replace an empty folder, or one of the same kind that holds nothing but what quantkit
            wrote; it stays in place until the new one is complete.
        later: files that will be added to it, relative to it.

    Raises:
        OutputError: ``output`` exists without ``force``, holds something else, or cannot be written
            (no space left).
    """
    refuse_directory(output, kind, force=force)
    with translated(output), stage_for(output) as stage:
        made = stage / "made"
        made.mkdir()
        with _told_as(output, made):
            yield made
        (made / MARKER).write_text(marker_text(made, kind, later), encoding="utf-8")
        _sync_all(made)
        _publish(made, output, stage, kind if force else None)
        sync(output.parent)


@contextmanager
def scratch_directory(output: Path) -> Iterator[Path]:
    """Yield an empty folder next to ``output``, on its file system; it is removed afterwards.

    Raises:
        OutputError: it cannot be written (no space left).
    """
    with translated(output), stage_for(output) as stage:
        yield stage


@contextmanager
def staged_file(output: Path, *, force: bool) -> Iterator[Path]:
    """Yield a path of the same name that becomes ``output`` when the body succeeds.

    Args:
        output: the file to make; its folder is made when missing.
        force: replace an empty file, or one that quantkit wrote.

    Raises:
        OutputError: ``output`` exists without ``force``, holds something else, or cannot be
            written.
    """
    refuse_file(output, force=force)
    with _made_file(output, _replace_own if force else _name_new) as made:
        yield made


@contextmanager
def rewritten_file(output: Path) -> Iterator[Path]:
    """Yield a path as ``staged_file``; whatever file was there is replaced.

    For files in a folder that is quantkit's, or that the caller gave to be written into.

    Raises:
        OutputError: it cannot be written.
    """
    with _made_file(output, Path.replace) as made:
        yield made


@contextmanager
def _told_as(output: Path, made: Path) -> Iterator[None]:
    """Name the output in errors of the body, not the stage, which is removed by then."""
    try:
        yield
    except QuantkitError as error:
        error.args = (str(error).replace(str(made), str(output)),)
        raise


@contextmanager
def claimed_directory(output: Path, *, kind: str) -> Iterator[None]:
    """Make a folder that commands fill step by step; an earlier one of this kind is emptied.

    What is in it when the body ends, however that is, counts as written by quantkit.

    Raises:
        OutputError: ``output`` holds something else, or cannot be written.
    """
    with staged_directory(output, kind=kind, force=True):
        pass
    try:
        yield
    finally:
        mark_directory(output, kind=kind)


def mark_directory(folder: Path, *, kind: str) -> None:
    """Write the marker of a folder again, for all that is in it.

    Raises:
        OutputError: it cannot be written.
    """
    with rewritten_file(folder / MARKER) as made:
        made.write_text(marker_text(folder, kind), encoding="utf-8")


def write_or_keep(write: Callable[[Path], None], output: Path) -> None:
    """Write what took long to compute; where that fails, into the folder for temporary files.

    Args:
        write: writes the whole of it to a path; called a second time when the first fails.
        output: where it belongs.

    Raises:
        OutputError: it could not be written to ``output``; the text says where it is instead.
    """
    try:
        write(output)
    except OutputError as error:
        raise OutputError(f"{error}; {_kept(write, output)}") from error


def _kept(write: Callable[[Path], None], output: Path) -> str:
    folder = Path(tempfile.mkdtemp(prefix="quantkit-kept-"))
    try:
        write(folder / output.name)
    except OutputError:
        folder.rmdir()
        return f"nor could it be kept in {folder.parent}: set TMPDIR to a folder with room"
    return f"the result is kept: move it from {folder / output.name} to where you want it"


@contextmanager
def _made_file(output: Path, publish: Callable[[Path, Path], object]) -> Iterator[Path]:
    """Yield a path in a stage; what the body wrote there is published as ``output``."""
    with translated(output), stage_for(output) as stage:
        made = stage / output.name
        with _told_as(output, made):
            yield made
        # safetensors writes 0600; a file should be as readable as one made by open().
        made.chmod(0o666 & ~_mask())
        sync(made)
        publish(made, output)
        sync(output.parent)


def _replace_own(made: Path, output: Path) -> None:
    # Once more: the work may have taken hours.
    refuse_file(output, force=True)
    made.replace(output)


def _publish(made: Path, output: Path, stage: Path, replaced: str | None) -> None:
    """Give a folder its name; ``replaced``: the kind that it may replace."""
    if replaced is None:
        _name_new(made, output)
        return
    former = rename_over(made, output, aside_of(stage, output))
    if former is None:
        return
    try:
        # Once more, where nobody else changes it: it is deleted next.
        refuse_foreign(former, replaced, output=output)
    except OutputError:
        rename_over(former, output, stage / "refused")
        raise


def _name_new(made: Path, output: Path) -> None:
    try:
        rename_new(made, output)
    except FileExistsError as error:
        raise already_there(output) from error


def _mask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask | OTHERS_WRITE


def _sync_all(folder: Path) -> None:
    for path in (*sorted(folder.rglob("*")), folder):
        _close_to_others(path)
        sync(path)


def _close_to_others(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & OTHERS_WRITE:
        path.chmod(mode & 0o7777 & ~OTHERS_WRITE)
