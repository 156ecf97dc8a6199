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
    #: the HIP source, compiled for the GPU that the tensors are on
    GPU = "gpu"
    #: plain PyTorch
    REFERENCE = "reference"


@dataclass(frozen=True)
class Choice:
    """A back end, and the reason when it is not a kernel."""

    backend: Backend
    #: empty when a kernel runs
    reason: str


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
    kernel = Backend.GPU if device.type == "cuda" else Backend.HOST
    reason = _why_no_kernel(op, k, group_scales) or _why_not_here(device)
    if forced not in (None, kernel):
        reason = f"the tensors are on {device}"
    if not reason:
        return Choice(kernel, "")
    if forced is not None:
        raise KernelError(f"{op}: the {forced.value} kernel was asked for and cannot run: {reason}")
    return Choice(Backend.REFERENCE, reason)


def is_free() -> bool:
    """Return True when no back end is forced."""
    return _forced.get() is None


@lru_cache(maxsize=4096)
def _why_no_kernel(op: str, k: int, group_scales: bool) -> str:  # noqa: FBT001
    from quantkit.device.ops import find_op

    multiple = find_op(op).k_multiple
    if group_scales:
        return "the kernels apply scales per tensor or per channel, not per group"
    if k % multiple or k == 0:
        return f"K {k} is not a multiple of {multiple}"
    return ""


def _why_not_here(device: torch.device) -> str:
    if device.type == "cpu":
        from quantkit.device import host

        return host.why_unavailable()
    if device.type != "cuda":
        return f"kernels run on cpu and cuda devices, and the tensors are on {device.type}"
    from quantkit.device.gpu.selftest import state_of

    index: int | None = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return state_of(index).problem
