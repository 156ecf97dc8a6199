"""Training one student in several processes: ranks, averaging and shared decisions."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from quantkit.errors import ModelError

#: Bytes of gradients that are averaged at a time: few calls, and little extra memory.
_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Ranks:
    """One of several processes; by default the only one."""

    rank: int = 0
    world: int = 1
    #: a group over the CPU for what is decided there; None when alone
    _control: Any = None

    @property
    def writes(self) -> bool:
        """True in the process that watches, saves, writes and prints."""
        return self.rank == 0

    def agree(self, value: float) -> float:
        """Return the first process's value in all of them."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        distributed.broadcast(shared, 0, group=self._control)
        return float(shared)

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their mean over all processes; names and shapes agree."""
        if self.world == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            distributed.all_reduce(flat)
            flat /= self.world
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` or ``accelerate launch`` started; alone without them.

    Args:
        device: of this process; decides between NCCL and gloo.

    Raises:
        ModelError: the processes cannot reach each other.
    """
    world = world_size()
    if world == 1:
        yield Ranks()
        return
    try:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"WORLD_SIZE is {world}, but the processes could not be connected ({error}); start "
            "with torchrun, or unset it"
        ) from error
    try:
        yield Ranks(distributed.get_rank(), world, distributed.new_group(backend="gloo"))
    finally:
        distributed.destroy_process_group()


def world_size() -> int:
    """Return how many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device(device: torch.device) -> torch.device:
    """Return this process's GPU where there are several processes, else the device itself."""
    if device.type != "cuda" or world_size() == 1:
        return device
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(own)
    return own
