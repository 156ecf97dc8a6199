"""Calls of an operation on tensors: outputs, addresses, stream, launch.

A call is prepared once per operation, shapes and dtypes: checks, choice of kernel and tile, grid
and numbers. After that, a call is found by the signature of its operands.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from quantkit.device import log
from quantkit.device.backends import Backend
from quantkit.device.gpu.devices import Device
from quantkit.device.gpu.kernel import Kernel
from quantkit.device.gpu.launcher import prepare_launch
from quantkit.device.ops.op import Output, Sizes

#: Operands that differ in nothing but their addresses.
Signature = tuple[object, ...]

#: Far more than a pipeline at one resolution needs, and small in memory.
_MOST_CALLS = 4096


class Call:
    """A prepared call of one kernel."""

    __slots__ = ("_like", "_name", "_op", "launch")

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        sizes: Sizes,
        outputs: Sequence[Output],
        nulls: Sequence[int] = (),
    ) -> None:
        """Prepare a call.

        Args:
            device: where the operands lie.
            sizes: what the numbers among the kernel's arguments follow from.
            outputs: the written arguments, which stand behind the others in launch order.
            nulls: which inputs are None.

        Raises:
            KernelError: the kernel cannot be compiled or loaded.
        """
        #: queues the kernel on given operands, outputs included
        self.launch = prepare_launch(device, kernel, sizes, nulls)
        self._op, self._name = kernel.operation, kernel.name
        self._like = tuple(_shaped(device.torch_device, *output) for output in outputs)

    def __call__(self, *inputs: Tensor | None) -> list[Tensor]:
        """Queue the operation on the current stream and return its outputs."""
        made = list(map(torch.empty_like, self._like))
        self.launch(*inputs, *made)
        log.note(self._op, self._name, Backend.GPU)
        return made

    def at(self, addresses: tuple[int, ...]) -> list[Tensor]:
        """Do the same for inputs that are contiguous and start on 16 bytes; see ``launch.at``."""
        made = list(map(torch.empty_like, self._like))
        self.launch.at((*addresses, *map(Tensor.data_ptr, made)))
        log.note(self._op, self._name, Backend.GPU)
        return made

    def shaped(self, shape: tuple[int, ...]) -> "Call":
        """Return the same call, whose one output has another shape of as many elements."""
        other, (like,) = copy(self), self._like
        other._like = (_shaped(like.device, shape, like.dtype),)  # noqa: SLF001  a copy
        return other


def _shaped(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of one element, repeated: ``empty_like`` takes half as long as ``empty``."""
    with torch.inference_mode(mode=False):
        return torch.empty((), dtype=dtype, device=device).expand(shape)


_calls: dict[Signature, Call] = {}


def signature(op: str, operands: Sequence[Tensor | None], words: tuple[Any, ...]) -> Signature:
    """Return what a prepared call depends on: shapes, dtypes, devices, and what is asked for."""
    parts = [None if t is None else (t.shape, t.dtype, t.get_device()) for t in operands]
    return (op, words, *parts)


def find(key: Signature) -> Call | None:
    """Return the call prepared for ``key``."""
    return _calls.get(key)


def keep(key: Signature, call: Call) -> Call:
    """Remember a call."""
    if len(_calls) >= _MOST_CALLS:
        # Sizes that never return; the kernels stay loaded.
        _calls.clear()
    _calls[key] = call
    return call


def forget() -> None:
    """Forget every prepared call."""
    _calls.clear()
