"""Prompts that both calibration and comparison have: numbers on those flatter.

A calibration file holds one digest of all its prompts, and how many there were. So they are looked
for as a run of that length in the texts that are at hand: what was given to the evaluation, whole,
and the bundled set.
"""

import hashlib
from collections.abc import Iterable, Sequence


def find_calibrated(
    digest: str, count: int, sources: Iterable[Sequence[str]]
) -> tuple[str, ...] | None:
    """Return the prompts that a calibration was taken with, if one of the sources holds them.

    Args:
        digest: SHA-256 of the prompts, one a line.
        count: how many there were.
        sources: lists of prompts; the calibration's may start anywhere in one.

    Returns:
        None where no source holds them.
    """
    for source in sources:
        for start in range(len(source) - count + 1):
            prompts = tuple(source[start : start + count])
            if hashlib.sha256("\n".join(prompts).encode()).hexdigest() == digest:
                return prompts
    return None


def count_seen(compared: Sequence[str], calibrated: Iterable[str]) -> int:
    """Return how many of the compared prompts are calibrated on, too."""
    known = frozenset(calibrated)
    return sum(prompt in known for prompt in compared)
