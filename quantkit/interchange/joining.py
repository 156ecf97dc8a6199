"""Joining rows of weights as the original layout has them, of floats, codes or blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.interchange.layout_names import OriginalTensor


def join(original: OriginalTensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the original tensor of diffusers' parts, given in their order."""
    joined = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return swap_halves(joined) if original.swapped else joined


def swap_halves(rows: Tensor) -> Tensor:
    """Return rows with their halves swapped: diffusers and the original order scale and shift."""
    return torch.cat(rows.chunk(2)[::-1])
