"""Expected SHA-256 digests of byte ranges of files, and checking them."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.storage.system import cores, open_to_read, read_into
from quantkit.storage.tensorfile import TensorInfo

#: Bytes that are read at once: large enough that hashing dominates, small enough to stay in cache.
CHUNK_BYTES = 1 << 20

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class ExpectedDigest:
    """The expected SHA-256 of a byte range of a file."""

    path: Path
    #: name in messages after the path, with a colon and a space: "conv_in.weight: "
    what: str
    start: int
    #: past the last byte
    stop: int
    #: hex
    sha256: str

    def breach(self) -> str:
        """Return a line on bytes with another digest; empty when they match."""
        try:
            found = _sha256(self.path, self.start, self.stop)
        except (OSError, EOFError) as error:
            return self.unreadable(error)
        return self.judged(found)

    def unreadable(self, error: Exception) -> str:
        """Return a line that says why the bytes cannot be read."""
        return f"{self.path}: {self.what}cannot be read ({error})"

    def judged(self, found: str) -> str:
        """Return a line on a digest that does not match; empty when it does."""
        if found == self.sha256:
            return ""
        return (
            f"{self.path}: {self.what}damaged: SHA-256 {found}, expected {self.sha256}; download "
            "it or pack the model again"
        )


class Hashing:
    """Expected digests that threads check while the caller does something else."""

    def __init__(self, claims: Sequence[ExpectedDigest]) -> None:
        """Start; hashing releases the GIL, so threads run in parallel with the caller."""
        # The largest first, so that no thread is left alone with one at the end.
        ordered = sorted(claims, key=lambda claim: claim.start - claim.stop)
        pool = ThreadPoolExecutor(cores())
        self._pending: list[Future[str]] = [pool.submit(claim.breach) for claim in ordered]
        pool.shutdown(wait=False)

    def join(self) -> None:
        """Wait for the rest.

        Raises:
            CheckpointError: the first claim that does not hold; the others are given up.
        """
        for future in self._pending:
            if breach := future.result():
                self.cancel()
                raise CheckpointError(breach)

    def cancel(self) -> None:
        """Drop what has not been started."""
        for future in self._pending:
            future.cancel()


def is_digest(text: str) -> bool:
    """Tell whether a text is a SHA-256 in hex."""
    return len(text) == 64 and _HEX.issuperset(text)


def sha256_of(path: Path, info: TensorInfo) -> str:
    """Return the SHA-256, in hex, of the raw bytes of one tensor.

    Args:
        path: the safetensors file.
        info: the tensor's row of that file's header.
    """
    return _sha256(path, info.start, info.stop)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256, in hex, of a whole file."""
    return _sha256(path, 0, path.stat().st_size)


def sha256_of_range(descriptor: int, start: int, stop: int) -> str:
    """Return the SHA-256, in hex, of the bytes from ``start`` up to ``stop`` of an open file.

    Raises:
        EOFError: the file ends before.
    """
    digest = hashlib.sha256()
    for chunk in chunks_of_range(descriptor, start, stop):
        digest.update(chunk)
    return digest.hexdigest()


def chunks_of_range(descriptor: int, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes from ``start`` up to ``stop`` of an open file, each until the next ones.

    Raises:
        EOFError: the file ends before.
    """
    buffer = memoryview(bytearray(min(CHUNK_BYTES, stop - start)))
    while start < stop:
        chunk = buffer[: stop - start]
        read_whole(descriptor, chunk, start)
        yield chunk
        start += len(chunk)


def read_whole(descriptor: int, chunk: memoryview, start: int) -> None:
    """Fill a chunk from an offset of an open file.

    Raises:
        EOFError: the file ends before.
    """
    while chunk:
        count = read_into(descriptor, chunk, start)
        if count == 0:
            raise EOFError(f"the file ends at byte {start}, expected {start + len(chunk)}")
        chunk, start = chunk[count:], start + count


def _sha256(path: Path, start: int, stop: int) -> str:
    descriptor = open_to_read(path)
    try:
        return sha256_of_range(descriptor, start, stop)
    finally:
        os.close(descriptor)
