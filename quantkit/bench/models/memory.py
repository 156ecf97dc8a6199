"""Device memory of a model."""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of memory of parameters and buffers, shared memory once."""
    tensors = chain(model.parameters(), model.buffers())
    stores = (part.untyped_storage() for tensor in tensors for part in _parts(tensor))
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, or those that it is made of."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is None:
        yield tensor
    else:
        for name in names()[0]:
            yield from _parts(getattr(tensor, name))


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
