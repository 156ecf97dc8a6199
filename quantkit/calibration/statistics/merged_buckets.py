"""Pouring timestep buckets together."""

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor


def bucket_groups(targets: Sequence[int]) -> list[Tensor]:
    """Return which buckets each new one is made of, when bucket b goes into ``targets[b]``."""
    return [
        torch.tensor([b for b, target in enumerate(targets) if target == wanted])
        for wanted in range(max(targets) + 1)
    ]


def targets_of(stored: Sequence[float], wanted: Sequence[float]) -> list[int]:
    """Return where each bucket of ``stored`` edges goes, when some of them are ``wanted``."""
    starts = (float("-inf"), *stored)
    return [bisect_right(wanted, start) for start in starts]
