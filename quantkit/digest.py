"""SHA-256 of tensors as their bytes lie in a file: it ties artefacts to the model they are for."""

import hashlib
import os
from pathlib import Path

from quantkit.tensorfile import TensorInfo

#: Bytes that are read at once: large enough that hashing dominates, small enough to stay in cache.
CHUNK_BYTES = 1 << 20


def sha256_of(path: Path, info: TensorInfo) -> str:
    """Return the SHA-256, in hex, of the raw bytes of one tensor.

    Args:
        path: the safetensors file.
        info: the tensor's row of that file's header.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sha256_of_range(descriptor, info.start, info.stop)
    finally:
        os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256, in hex, of a whole file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sha256_of_range(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def sha256_of_range(descriptor: int, start: int, stop: int) -> str:
    """Return the SHA-256, in hex, of the bytes from ``start`` up to ``stop`` of an open file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, stop - start)))
    while start < stop:
        count = os.preadv(descriptor, [buffer[: stop - start]], start)
        if count == 0:
            raise EOFError(f"the file ends at byte {start}, wanted {stop}")
        digest.update(buffer[:count])
        start += count
    return digest.hexdigest()
