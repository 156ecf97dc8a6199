"""Concatenation of two token streams, without a copy where both are views of one tensor."""

import torch
from torch import Tensor


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Return ``torch.cat([first, second], dim=1)``, without a copy of views that are adjacent.

    Args:
        first: (B, T, K).
        second: (B, U, K).

    Returns:
        (B, T + U, K); it may share the memory of both.
    """
    if torch.compiler.is_compiling() or not _are_adjacent(first, second):
        return torch.cat([first, second], dim=1)
    (pictures, tokens, width), more = first.shape, second.shape[1]
    size = (pictures, tokens + more, width)
    return first.as_strided(size, (size[1] * width, width, 1), first.storage_offset())


def _are_adjacent(first: Tensor, second: Tensor) -> bool:
    """Tell whether tokens of the second follow those of the first in one contiguous tensor."""
    plain = type(first) is type(second) is Tensor and first.device.type != "meta"
    graph = torch.is_grad_enabled() and (first.requires_grad or second.requires_grad)
    alike = first.ndim == second.ndim == 3 and first.dtype is second.dtype
    if graph or not (plain and alike) or not (first.numel() and second.numel()):
        return False
    (pictures, tokens, width), more = first.shape, second.shape[1]
    return bool(
        second.shape == (pictures, more, width)
        and first.stride() == second.stride() == ((tokens + more) * width, width, 1)
        and second.storage_offset() == first.storage_offset() + tokens * width
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )
