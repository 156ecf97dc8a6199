"""The exponential moving average of a layer's amax, call by call, and how two of them join."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: What the newest call weighs: the average remembers about the last ten, half of what a bucket sees
#: in a calibration of 16 prompts in batches of 4 over 20 steps in 4 buckets.
RATE = 0.1


def step_averages(averages: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Take one more value into each of many averages, in place; they start at zero.

    Args:
        averages: float64, on any device.
        values: of the same shapes and dtype.
    """
    torch._foreach_lerp_(list(averages), list(values), RATE)


def one_by_one(average: Tensor, running: Tensor, steps: Sequence[int]) -> Tensor:
    """Return an average that goes on over batches that ran at once, as if one after another.

    Args:
        average: float64 (B,), with its start.
        running: float64 (B, batches), the same over each batch alone.
        steps: by bucket, the values that each batch gave.
    """
    later = torch.arange(running.shape[1], 0, -1, dtype=torch.float64) - 1
    passed = torch.tensor(steps, dtype=torch.float64)
    keep = (1 - RATE) ** torch.outer(passed, torch.cat((later[:1] + 1, later)))
    keep = keep.to(running.device)
    return (keep * torch.cat((average.unsqueeze(1), running), dim=1)).sum(dim=1)


def without_start(average: Tensor, updates: Tensor) -> Tensor:
    """Return the average without the zero that it started from; 0 before the first value.

    Source: Kingma and Ba 2015, Adam, arXiv:1412.6980, section 3.
    """
    share = known_share(updates)
    return torch.where(share > 0, average / share, torch.zeros_like(average))


def known_share(updates: Tensor) -> Tensor:
    """Return the weight that values have against the starting zero, float64, 0 to 1."""
    return 1 - (1 - RATE) ** updates.double()


def continued(first: Tensor, before: Tensor, second: Tensor, after: Tensor) -> Tensor:
    """Return the average over both runs, as if the second had gone on where the first ended.

    Args:
        first: float64 (B,), without its start.
        before: int64 (B,), the values that it averages.
        second: as ``first``, of the later run.
        after: as ``before``.
    """
    total = known_share(before) * (1 - RATE) ** after.double() * first + known_share(after) * second
    return without_start(total, before + after)
