"""What a model takes of a device's memory."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in chain(model.parameters(), model.buffers())}
    return sum(_bytes(tensor) for tensor in tensors.values())


def _bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes, those of its parts for a tensor that is made of some."""
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        return tensor.nbytes
    return sum(_bytes(getattr(tensor, name)) for name in parts()[0])


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the bytes that a step takes beside what is allocated already; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
