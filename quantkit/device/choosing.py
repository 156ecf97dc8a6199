"""Choosing the backend of an operation, with the reason where it is no kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from quantkit.device.archs import Arch, OneLaunch
from quantkit.device.backends import Backend, forced
from quantkit.device.host import library as host
from quantkit.device.ops.table import find_op
from quantkit.errors import KernelError

if TYPE_CHECKING:
    from quantkit.device.gpu.selftest import DeviceState

_supposed: ContextVar[Arch | None] = ContextVar("quantkit_supposed_arch", default=None)


@dataclass(frozen=True)
class Choice:
    """A back end, and the reason when it is not a kernel."""

    backend: Backend
    #: empty when a kernel runs
    reason: str


@contextmanager
def supposing(arch: Arch) -> Iterator[None]:
    """Choose inside the block (in this thread) as if GPUs were of this target: nothing may run."""
    token = _supposed.set(arch)
    try:
        yield
    finally:
        _supposed.reset(token)


def supposed() -> Arch | None:
    """Return the target that GPUs are supposed to be of; None where they are what they are."""
    return _supposed.get()


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
    asked = forced()
    if asked is Backend.REFERENCE:
        return Choice(Backend.REFERENCE, "asked for")
    kernel = Backend.GPU if device.type == "cuda" else Backend.HOST
    reason = _why_no_kernel(op, k, group_scales) or _why_not_here(device, op)
    if asked not in (None, kernel):
        reason = f"the tensors are on {device}"
    if not reason:
        return Choice(kernel, "")
    if asked is not None:
        raise KernelError(f"{op}: the {asked.value} kernel was asked for and cannot run: {reason}")
    return Choice(Backend.REFERENCE, reason)


def why_on_request(
    op: str, device: torch.device, made: tuple[OneLaunch, int, int] | None = None
) -> str:
    """Return why torch computes though ``choose`` names a kernel.

    Empty where it does not, and where a back end is forced with ``use``.

    Args:
        op: a name in OPS.
        device: where the operands lie.
        made: what makes attention's codes in one launch, columns of a head, and keys.
    """
    if device.type != "cuda" or forced() is not None:
        return ""
    arch = _arch_of(device)
    return arch.why_on_request(find_op(op).family, made) if arch else ""


def least_keys(device: torch.device, launch: OneLaunch, columns: int) -> int | None:
    """Return from how many keys on attention is a kernel's where its codes are of one launch.

    None where it is not, or does not depend on that.
    """
    arch = _arch_of(device) if device.type == "cuda" else None
    return arch.least_keys(launch, columns) if arch else None


def pays(op: str, device: torch.device, *, fast: bool) -> bool:
    """Return whether a product that ends in codes takes less time than it and a pass behind it.

    Args:
        op: a name in OPS.
        device: where the operands lie.
        fast: sums may stay in the matrix unit.
    """
    arch = _arch_of(device) if device.type == "cuda" and not fast else None
    return arch is None or op not in arch.slow_ends


@lru_cache(maxsize=4096)
def _why_no_kernel(op: str, k: int, group_scales: bool) -> str:  # noqa: FBT001
    multiple = find_op(op).k_multiple
    if group_scales:
        return "the kernels apply scales per tensor or per channel, not per group"
    if k % multiple or k == 0:
        return f"K {k} is not a multiple of {multiple}"
    return ""


def _why_not_here(device: torch.device, op: str) -> str:
    if device.type == "cpu":
        return host.why_unavailable()
    if device.type != "cuda":
        return f"kernels run on cpu and cuda devices, and the tensors are on {device.type}"
    family = find_op(op).family
    if (arch := supposed()) is not None:
        return arch.why_without(family, op)
    state = _state(device)
    return state.problem or (state.device.arch.why_without(family, op) if state.device else "")


def _arch_of(device: torch.device) -> Arch | None:
    """Return the target of a GPU, supposed or its own; None where it is not trusted."""
    if (arch := supposed()) is not None:
        return arch
    found = _state(device).device
    return found.arch if found else None


def _state(device: torch.device) -> "DeviceState":
    from quantkit.device.gpu.selftest import state_of

    index: int | None = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return state_of(index)
