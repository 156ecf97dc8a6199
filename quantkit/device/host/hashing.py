"""SHA-256 of several streams in one call, two at a time where the CPU can; hashlib where not."""

import ctypes
import hashlib
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias, TypeVar

from quantkit.device.host import core
from quantkit.device.host.encoder import address

Result = TypeVar("Result")

#: FIPS 180-4, 5.3.3: the first 32 bits of the fractional parts of the square roots of the primes.
_START = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip


class Digest(Protocol):
    """The part of hashlib's interface that is used here."""

    def update(self, data: memoryview, /) -> None:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


#: Digests of ``new_digest`` and their next bytes, that can be written to.
Parts: TypeAlias = Sequence[tuple[Digest, memoryview | bytearray]]


def new_digest() -> Digest:
    """Return a SHA-256 of no bytes yet."""
    return hashlib.sha256() if why_unavailable() else _Sha256()


def update_all(parts: Parts) -> None:
    """Give each digest its next bytes, without Python's lock; none may be named twice."""
    # The longest first: two that are alike keep both halves of the CPU's unit busy to the end.
    filled = sorted((part for part in parts if len(part[1])), key=lambda part: -len(part[1]))
    if not filled:
        return
    if not isinstance(filled[0][0], _Sha256):
        for digest, data in filled:
            digest.update(memoryview(data))
        return
    table = (_Part * len(filled))(*(_part(digest, data) for digest, data in filled))
    core.library().qk_sha256_update(table, len(filled))


def run_together(jobs: Sequence[Generator[Parts, None, Result]]) -> list[Result]:
    """Return what jobs return, that yield what they want to be hashed before they go on."""
    results: dict[int, Result] = {}
    while len(results) < len(jobs):
        parts: list[tuple[Digest, memoryview | bytearray]] = []
        for place, job in enumerate(jobs):
            if place in results:
                continue
            try:
                parts += next(job)
            except StopIteration as done:
                results[place] = done.value
        update_all(parts)
    return [results[place] for place in range(len(jobs))]


@lru_cache(maxsize=1)
def why_unavailable() -> str:
    """Return why this machine hashes with hashlib; empty when the core does."""
    if problem := core.why_unavailable():
        return problem
    return "" if core.library().qk_sha256_is_built() else "the CPU has no instructions for it"


class _Hash(ctypes.Structure):
    """The struct of the same name in kernels/host/sha256.cpp."""

    _fields_ = (
        ("state", ctypes.c_uint32 * 8),
        ("tail", ctypes.c_uint8 * 64),
        ("length", ctypes.c_int64),
    )


class _Part(ctypes.Structure):
    _fields_ = (("hash", ctypes.c_void_p), ("data", ctypes.c_void_p), ("size", ctypes.c_int64))


class _Sha256:
    def __init__(self) -> None:
        self.hash = _Hash((ctypes.c_uint32 * 8)(*_START))

    def update(self, data: memoryview | bytearray) -> None:
        # ctypes knows no address of what cannot be written to.
        update_all(((self, bytearray(data) if memoryview(data).readonly else data),))

    def hexdigest(self) -> str:
        digest = (ctypes.c_uint8 * 32)()
        core.library().qk_sha256_digest(ctypes.byref(self.hash), digest)
        return bytes(digest).hex()


def _part(digest: Digest, data: memoryview | bytearray) -> _Part:
    assert isinstance(digest, _Sha256)
    return _Part(ctypes.addressof(digest.hash), address(data), len(data))
