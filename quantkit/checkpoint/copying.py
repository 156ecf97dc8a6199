"""Byte-for-byte copies of what a packed checkpoint leaves as it was."""

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

#: Weights in any format, and what indexes them. Beside packed weights they would be a second,
#: unpacked truth that a loader may choose.
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx", ".gguf",
    ".safetensors.index.json", ".bin.index.json",
)  # fmt: skip

#: Kernels and file systems without copy_file_range, or a pair of them that it does not join.
_NO_RANGE_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


def list_files(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder``, relative to it, sorted; links to folders are followed."""
    for path, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        yield from (Path(path, name).relative_to(folder) for name in sorted(names))


def is_weight(path: Path) -> bool:
    """Tell whether the name is that of a weight file or of an index of weights."""
    return path.name.endswith(WEIGHT_SUFFIXES) or ".safetensors.index." in path.name


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
    done = 0
    while done < size:
        count = os.copy_file_range(reader, writer, size - done)
        if count == 0:
            raise OSError(errno.EINVAL, "copy_file_range stopped early")
        done += count
