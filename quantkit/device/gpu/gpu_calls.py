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

#: Shape, strides and dtype of what is made.
LaidOut = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
#: Operands that differ in nothing but their addresses.
Signature = tuple[object, ...]

#: Far more than a pipeline at one resolution needs, and small in memory.
_MOST_CALLS = 4096


class Call:
    """A prepared call of one kernel."""

    __slots__ = ("device", "launch", "outputs", "said")

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
        self.device = device
        #: shape, strides and dtype of each
        self.outputs = tuple(_laid_out(*output) for output in outputs)
        #: for ``log.note``
        self.said = (kernel.operation, kernel.name, Backend.GPU)

    def __call__(self, *inputs: Tensor | None) -> list[Tensor]:
        """Queue the operation on the current stream and return its outputs."""
        device = self.device
        if device.current() == device.index:
            return self._run(inputs)
        with device.guard(device.index):
            return self._run(inputs)

    def _run(self, inputs: tuple[Tensor | None, ...]) -> list[Tensor]:
        new = self.device.memory.new
        made = [new(*output) for output in self.outputs]
        self.launch(*inputs, *made)
        log.note(*self.said)
        return made

    def shaped(self, shape: tuple[int, ...]) -> "Call":
        """Return the same call, whose one output has another shape of as many elements."""
        other, ((_, _, dtype),) = copy(self), self.outputs
        other.outputs = (_laid_out(shape, dtype),)
        return other


def _laid_out(shape: tuple[int, ...], dtype: torch.dtype) -> LaidOut:
    strides = torch.empty(shape, device="meta").stride()
    return tuple(shape), strides, dtype


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
