"""Backends of operations, and forcing one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum


class Backend(Enum):
    """A backend that computes operations."""

    #: the HIP source, compiled by the system's C++ compiler, run lane by lane
    HOST = "host"
    #: the HIP source, compiled for the GPU that the tensors are on
    GPU = "gpu"
    #: plain PyTorch
    REFERENCE = "reference"


_forced: ContextVar[Backend | None] = ContextVar("quantkit_backend", default=None)
_fast: ContextVar[bool] = ContextVar("quantkit_fast_sums", default=False)


@contextmanager
def use(backend: Backend | None) -> Iterator[None]:
    """Force a back end inside the block (in this thread); None chooses by itself again."""
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> Backend | None:
    """Return the back end that is forced in this thread."""
    return _forced.get()


def is_free() -> bool:
    """Return True when no back end is forced."""
    return _forced.get() is None


@contextmanager
def fast_sums() -> Iterator[None]:
    """Let matrix units keep all sums to themselves inside the block (in this thread).

    Hopper's adds with fewer bits than float32 has, so by default its sums of every 128 products are
    added in float32. Without that, products of a long K are faster and less exact: as with
    ``use_fast_accum`` of ``torch._scaled_mm``. Other back ends have one mode and stay as they are.
    """
    token = _fast.set(True)
    try:
        yield
    finally:
        _fast.reset(token)


def sums_are_fast() -> bool:
    """Return whether ``fast_sums`` holds."""
    return _fast.get()
