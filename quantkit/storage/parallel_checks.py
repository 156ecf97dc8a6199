"""Checks in parallel threads, for work that releases the GIL: hashing, reading, torch."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quantkit.storage.system import cores

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Each thread holds one thing, as a layer's codes.
_MOST = 8


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item]
) -> Generator[Result, None, None]:
    """Yield results of ``work`` in the items' order; the rest is cancelled if the caller stops."""
    pool = ThreadPoolExecutor(min(cores(), _MOST))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
