"""Byte-for-byte copies of the files that a packed checkpoint leaves unchanged."""

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from quantkit.errors import ModelError
from quantkit.storage.inputfile import KINDS
from quantkit.storage.marker import MARKER

#: Weights in any format, and their indexes. Next to packed weights they would be a second,
#: unpacked truth that a loader may choose.
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".pkl", ".msgpack", ".h5", ".onnx", ".gguf",
    ".safetensors.index.json", ".bin.index.json",
)  # fmt: skip
#: Pickles, which may run code when they are opened, and their indexes: no copy has any.
_PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".pkl", ".bin.index.json")

#: Kernels and file systems without copy_file_range, or a pair of them that it does not join.
_NO_RANGE_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


def list_files(folder: Path, *, within: Path | None = None) -> list[Path]:
    """Return the files below ``folder``, relative to it, sorted, without quantkit's own marker.

    Args:
        folder: a model, or a part of one.
        within: the model, in which links may lead; None: ``folder``.

    Raises:
        ModelError: a link that leaves the model (the blobs of the hub's cache belong to it), a link
            to a folder, or what is neither file nor folder: a copy of it would be uploaded unseen,
            or never end.
    """
    places = _places_of(within or folder)
    return sorted(
        path.relative_to(folder)
        for path in _walk(folder)
        if path.name != MARKER and _is_copied(path, places)
    )


def _walk(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name)
        else:
            yield folder / entry.name


def _places_of(model: Path) -> tuple[Path, ...]:
    """Return the folders where links of a model may end."""
    root = Path(os.path.realpath(model))
    caches = [
        folder
        for folder in root.parents
        if folder.name.startswith("models--") and (folder / "snapshots") in root.parents
    ]
    return (root, *(cache / "blobs" for cache in caches))


def _is_copied(path: Path, places: tuple[Path, ...]) -> bool:
    """Tell that a path is a file of the model; all else is refused."""
    real = Path(os.path.realpath(path))
    if path.is_symlink():
        if not real.exists():
            raise ModelError(f"{path}: a link that ends nowhere; put the file there, or delete it")
        if not any(place in real.parents for place in places):
            raise ModelError(
                f"{path}: a link out of the model, to {real}; put the file itself there if it "
                "belongs to the model, else delete the link"
            )
    if not real.is_file():
        what = KINDS[stat.S_IFMT(real.stat().st_mode)]
        raise ModelError(
            f"{path}: {'a link to ' * path.is_symlink()}{what}, expected files and folders alone; "
            "delete it, or put files there"
        )
    return True


def is_weight(path: Path) -> bool:
    """Tell whether the name is that of a weight file or of an index of weights."""
    return path.name.endswith(WEIGHT_SUFFIXES) or ".safetensors.index." in path.name


def is_pickle(path: Path) -> bool:
    """Tell whether the name is that of a pickle, or of an index of pickles."""
    return path.name.endswith(_PICKLE_SUFFIXES)


def copy_files(source: Path, target: Path, files: Collection[Path]) -> None:
    """Copy files (relative paths) as independent files; links are resolved."""
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        copy_file(source / file, target / file)


def copy_file(source: Path, target: Path) -> None:
    """Copy one file's bytes; the file system shares the blocks where it can (reflink)."""
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            _copy_ranges(reader.fileno(), writer.fileno(), os.fstat(reader.fileno()).st_size)
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
            writer.truncate(0)
            reader.seek(0)
            writer.seek(0)
            shutil.copyfileobj(reader, writer, 1 << 20)


def _copy_ranges(reader: int, writer: int, size: int) -> None:
    if not hasattr(os, "copy_file_range"):  # which Linux alone has
        raise OSError(errno.ENOSYS, "no copy_file_range")
    done = 0
    while done < size:
        count = os.copy_file_range(reader, writer, size - done)
        if count == 0:
            raise OSError(errno.EINVAL, "copy_file_range stopped early")
        done += count
