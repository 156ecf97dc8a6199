"""A log of kernels: a count per operation, variant and backend, while it is open."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quantkit.device.backends import Backend


@dataclass(frozen=True)
class KernelLog:
    """Calls seen while a ``record()`` was open, from every thread."""

    #: (operation, variant, back end) -> number of calls
    calls: Counter[tuple[str, str, Backend]] = field(default_factory=Counter)


_lock = threading.Lock()
# Replaced, never changed: ``note`` reads it without the lock, so that no listener costs nothing.
_listening: tuple[KernelLog, ...] = ()


@contextmanager
def record() -> Iterator[KernelLog]:
    """Yield a log that counts every call until the block ends; records may nest."""
    global _listening  # noqa: PLW0603  one process-wide tuple is what makes ``note`` free
    log = KernelLog()
    with _lock:
        _listening = (*_listening, log)
    try:
        yield log
    finally:
        with _lock:
            _listening = tuple(other for other in _listening if other is not log)


def note(op: str, variant: str, backend: Backend) -> None:
    """Count one call in every open record."""
    if _listening:
        with _lock:
            for log in _listening:
                log.calls[op, variant, backend] += 1


def note_again(calls: Counter[tuple[str, str, Backend]]) -> None:
    """Count calls that were recorded before, and are replayed."""
    if _listening:
        with _lock:
            for log in _listening:
                log.calls.update(calls)
