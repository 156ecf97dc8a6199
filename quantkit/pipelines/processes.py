"""Calibration in several processes: sharing batches, and communication by torch.distributed.

``torchrun`` and ``accelerate launch`` start them and set the environment that is read here.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from quantkit.errors import QuantkitError

T = TypeVar("T")

#: What a launcher sets; a lone WORLD_SIZE may be left over from a cluster's scheduler.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Processes:
    """The processes that work together, seen from one of them."""

    rank: int = 0
    count: int = 1
    #: rank among those on this machine
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """True in the one process that writes and prints."""
        return self.rank == 0

    def share(self, items: int) -> range:
        """Return which of so many items this process takes: a run of them, in the ranks' order."""
        start, stop = (-(-rank * items // self.count) for rank in (self.rank, self.rank + 1))
        return range(start, stop)

    def device(self, text: str) -> str:
        """Return the device that ``text`` means here: GPUs are dealt out in turn."""
        found = torch.cuda.device_count()
        if self.count > 1 and found and text in {"auto", "cuda"}:
            return f"cuda:{self.local_rank % found}"
        return text

    def on_a_device(self) -> int:
        """Return how many of them share a device, at most."""
        return -(-self.count // max(torch.cuda.device_count(), 1))

    def exchange(self, value: T) -> list[T]:
        """Return the values of all processes, by rank; every process must call this.

        Raises:
            QuantkitError: one of them is gone.
        """
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        with _peers_are_there():
            distributed.all_gather_object(values, value)
        return values

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes in the first one, and none in the others."""
        if self.is_first:
            with _peers_are_there():
                return [value, *map(_receive, range(1, self.count))]
        content = _packed(value)
        with _peers_are_there():
            distributed.send(torch.tensor(len(content)), 0)
            distributed.send(content, 0)
        return []

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body in every process; if one fails, all of them raise its error.

        Raises:
            QuantkitError: of the first process that had one.
        """
        failure: QuantkitError | None = None
        try:
            yield
        except QuantkitError as error:
            if self.count == 1:
                raise
            failure = error
        for found in self.exchange(failure):
            if found is not None:
                raise found


ALONE = Processes()


@contextmanager
def joined() -> Iterator[Processes]:
    """Yield the processes that a launcher started; ``ALONE`` without one.

    An error leaves through the first process; the others wait until it is gone, and end silently
    with the same exit code.
    """
    if not all(name in os.environ for name in _LAUNCHED) or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    # Objects on the CPU are all that is sent: gloo, whatever the pipeline runs on.
    distributed.init_process_group("gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    try:
        yield Processes(rank, count, int(os.environ.get("LOCAL_RANK", rank)))
    except QuantkitError as error:
        if rank == 0:
            raise
        _wait_for_first()
        sys.exit(error.exit_code)
    distributed.destroy_process_group()


class _Pickler(pickle.Pickler):
    """Writes tensors as bytes: torch makes an archive of each, which takes longer than sending."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made again."""
        if not isinstance(value, Tensor):
            return NotImplemented
        content = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _as_tensor, (content, value.dtype, tuple(value.shape))


def _as_tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _packed(value: object) -> Tensor:
    """Return a value as bytes to send: gathering objects moves every byte several times."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _receive(rank: int) -> Any:
    size = torch.tensor(0)
    distributed.recv(size, rank)
    content = torch.empty(int(size), dtype=torch.uint8)
    distributed.recv(content, rank)
    return pickle.loads(content.numpy().tobytes())  # noqa: S301  of a process of this very run


def _wait_for_first() -> None:
    """Return when the first process has ended: a launcher kills all as soon as one fails."""
    try:
        distributed.recv(torch.empty(1), src=0)
    except RuntimeError:
        # What was waited for: it never sends, so the connection was closed.
        return


@contextmanager
def _peers_are_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise QuantkitError(
            f"another process of this calibration ended ({reason}); read its message, then start "
            "all processes again and resume",
            fields=("resume",),
        ) from error
