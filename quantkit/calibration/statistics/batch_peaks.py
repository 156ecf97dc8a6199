"""The largest |x| of each of a recipe's batches, where several run at once.

The moving average goes on from batch to batch, and must not depend on how many a GPU had room for.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from quantkit.calibration.statistics.input_measure import Measured

#: Prompts of each batch.
Sizes = tuple[int, ...]


def peaks_by_batch(found: Sequence[Measured], sizes: Sizes) -> list[Tensor]:
    """Return the largest |x| of each batch in some inputs, without waiting for the device.

    Args:
        found: of inputs; without peaks of images, as of what all prompts share, all of an input
            counts in every batch.
        sizes: of the batches that run at once.

    Returns:
        of each input, float64 (batches,).
    """
    whole = largest_of([seen.amax for seen in found])
    values = list(whole.double().unsqueeze(1).expand(-1, len(sizes)))
    by_images: dict[int, list[int]] = {}
    for at, seen in enumerate(found):
        if seen.peaks is not None:
            by_images.setdefault(len(seen.peaks), []).append(at)
    for images, places in by_images.items():
        peaks = torch.stack([p for at in places if (p := found[at].peaks) is not None])
        of_batches = peaks[:, _images_of(sizes, images, peaks.device)].amax(dim=2).double()
        for at, value in zip(places, of_batches, strict=True):
            values[at] = value
    return values


@lru_cache(maxsize=64)
def _images_of(sizes: Sizes, images: int, device: torch.device) -> Tensor:
    """Return the images of each batch, int64 (batches, most of one), the first one repeated."""
    prompts = sum(sizes)
    parts = range(0, images, prompts)
    ends = list(accumulate(sizes))
    rows = [
        [part + prompt for part in parts for prompt in range(end - size, end)]
        for size, end in zip(sizes, ends, strict=True)
    ]
    most = max(map(len, rows))
    return torch.tensor([row + row[:1] * (most - len(row)) for row in rows], device=device)


def largest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest |x| of each tensor, of their dtype, (n,)."""
    norms: tuple[Tensor, ...] = torch._foreach_norm(list(tensors), torch.inf)  # noqa: SLF001
    return torch.stack(norms)
