"""How long work tells what it is doing, without knowing who listens."""

from typing import Protocol


class Progress(Protocol):
    """Called as work advances; ``done`` reaches ``total`` when the step is over."""

    def __call__(self, step: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` parts of ``step`` are finished."""


def silent(step: str, done: int, total: int) -> None:
    """Report nothing."""
    del step, done, total
