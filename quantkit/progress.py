"""Progress of long work: the interface of its listeners."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")
#: Told a line of text on the way, as about every loss of a training.
Tell = Callable[[str], None]


class Progress(Protocol):
    """Called as work advances; ``done`` reaches ``total`` when the step is over."""

    def __call__(self, step: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` parts of ``step`` are finished."""


def silent(step: str, done: int, total: int) -> None:
    """Report nothing."""
    del step, done, total


def unheard(line: str) -> None:
    """Listen to no line."""
    del line


def tracked(progress: Progress, step: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, and tell of those done."""
    for done, item in enumerate(items):
        progress(step, done, len(items))
        yield item
    progress(step, len(items), len(items))
