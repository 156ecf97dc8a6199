"""Where an operation runs, and why not on a kernel when it does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from quantkit.errors import KernelError


class Backend(Enum):
    """What computes an operation."""

    #: the HIP source, compiled by the system's C++ compiler, run lane by lane
    HOST = "host"
    #: plain PyTorch
    REFERENCE = "reference"


@dataclass(frozen=True)
class Choice:
    """A back end, and the reason when it is not a kernel."""

    backend: Backend
    #: empty when a kernel runs
    reason: str


_HOST = Choice(Backend.HOST, "")
_forced: ContextVar[Backend | None] = ContextVar("quantkit_backend", default=None)


@contextmanager
def use(backend: Backend | None) -> Iterator[None]:
    """Force a back end inside the block (in this thread); None chooses by itself again."""
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(op: str, device: torch.device, *, k: int, group_scales: bool = False) -> Choice:
    """Choose the back end of one call.

    Args:
        op: a name in OPS.
        device: where the operands lie.
        k: length of the reduction axis.
        group_scales: the weight has scales per group along K.

    Raises:
        KernelError: a kernel was forced with ``use`` and cannot run this.
    """
    forced = _forced.get()
    if forced is Backend.REFERENCE:
        return Choice(Backend.REFERENCE, "asked for")
    reason = _why_no_kernel(op, device.type, k, group_scales) or _why_no_host()
    if not reason:
        return _HOST
    if forced is Backend.HOST:
        raise KernelError(f"{op}: the host kernel was asked for and cannot run: {reason}")
    return Choice(Backend.REFERENCE, reason)


@lru_cache(maxsize=4096)
def _why_no_kernel(op: str, device: str, k: int, group_scales: bool) -> str:  # noqa: FBT001
    from quantkit.device.ops import find_op

    multiple = find_op(op).k_multiple
    if device != "cpu":
        return f"kernels are launched on the CPU only so far, and the tensors are on {device}"
    if group_scales:
        return "the kernels apply scales per tensor or per channel, not per group"
    if k % multiple or k == 0:
        return f"K {k} is not a multiple of {multiple}"
    return ""


def _why_no_host() -> str:
    from quantkit.device import host

    return host.why_unavailable()
