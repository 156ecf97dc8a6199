"""Launching one kernel: everything that does not change between calls is prepared once.

What is left per call are the addresses of the operands and the stream. The steps are C functions
that take and return ready values (struct, map over tensor methods, ctypes values made beforehand):
a loop in Python over the operands alone would take longer than the driver takes to queue a kernel.
"""

import ctypes
import struct
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.device.geometry import compile_expression, geometry_of
from quantkit.device.ops import Variant
from quantkit.errors import KernelError

if TYPE_CHECKING:
    from quantkit.device.gpu.devices import Device

_SLOT = 8
#: Kernels move 16 bytes at a time.
_MISALIGNED = 0xF
_INT_MAX = 2**31 - 1

_pointer = ctypes.c_void_p.from_param
_address = Tensor.data_ptr
_contiguous = Tensor.is_contiguous
_number = int.from_bytes


class Launcher:
    """A kernel on one device with its grid and numbers fixed; may be called from any thread."""

    __slots__ = (
        "_current",
        "_device",
        "_entry",
        "_free",
        "_head",
        "_index",
        "_mask",
        "_pack",
        "_select",
        "_stream",
        "_symbol",
        "_tail",
    )

    def __init__(
        self,
        device: "Device",
        function: int,
        variant: Variant,
        sizes: dict[str, int],
        nulls: Sequence[int] = (),
    ) -> None:
        """Prepare a launch.

        Args:
            device: where the operands lie.
            function: handle of the kernel, loaded on ``device``.
            sizes: m, n and k, or those that the operation has.
            nulls: which arguments are null.

        Raises:
            KernelError: a size that a kernel's 32-bit integers do not hold.
        """
        geometry, args = geometry_of(variant), variant.op.args
        pointers = sum(a.is_pointer for a in args)
        # One format packs all addresses: numbers stand behind them in every kernel.
        assert all(a.is_pointer for a in args[:pointers])
        numbers = [sizes[a.name] for a in args[pointers:]]
        grid = [compile_expression(text)(sizes) for text in geometry.grid]
        if not all(0 < number <= _INT_MAX for number in (*numbers, *grid)):
            raise KernelError(f"{variant.symbol}: sizes {sizes} do not fit 32-bit integers")
        self._device, self._index, self._symbol = device, device.index, variant.symbol
        self._current, self._stream = device.current, device.stream
        self._entry = device.driver.launch_kernel
        self._head = (_pointer(function), *grid, geometry.block, 1, 1, 0)
        present = [i for i in range(pointers) if i not in nulls]
        self._select: Any = itemgetter(*present) if nulls else tuple
        # Pad bytes are written as zeros: a null pointer.
        layout = "".join("Q" if i in present else "8x" for i in range(pointers))
        self._pack = struct.Struct(f"<{layout}").pack_into
        self._mask = sum(_MISALIGNED << 8 * _SLOT * i for i in range(pointers))
        self._tail = bytes(_SLOT * pointers) + b"".join(struct.pack("<q", n) for n in numbers)
        # Parameter blocks that no thread is using. Both ends of a deque are safe without a lock.
        self._free: deque[_Block] = deque()

    def __call__(self, *operands: Tensor | None) -> None:
        """Queue the kernel on the current stream.

        Args:
            operands: in launch order, None where it was said to be null. Those that are not
                contiguous, or do not start on 16 bytes, are copied first.

        Raises:
            KernelError: the driver refuses.
        """
        tensors: tuple[Tensor, ...] = self._select(operands)
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(self._head, self._tail)
        slots = block.slots
        self._pack(slots, 0, *map(_address, tensors))
        if _number(slots, "little") & self._mask or not all(map(_contiguous, tensors)):
            # The copies may be freed at once: torch reuses memory in the order of the stream.
            copies = [_plain(tensor) for tensor in tensors]
            self._pack(slots, 0, *map(_address, copies))
        if self._current() == self._index:
            stream = self._stream(self._index)
            if stream != block.stream:
                block.turn_to(stream)
            status = self._entry(*block.arguments)
            if status:
                self._again(status, block)
        else:
            with self._device.guard(self._index):
                block.turn_to(self._stream(self._index))
                self._again(self._entry(*block.arguments), block)
        # The driver has copied the parameters when it returns.
        self._free.append(block)

    def _again(self, status: int, block: "_Block") -> None:
        driver = self._device.driver
        if status in driver.unbound:
            # A thread that torch has not used yet.
            driver.bind(self._index)
            status = self._entry(*block.arguments)
        driver.check("launch the kernel", status, self._symbol)


class _Block:
    """Memory for the arguments of one launch under way, and the driver's arguments around it."""

    __slots__ = ("_head", "_params", "arguments", "slots", "stream")

    def __init__(self, head: tuple[Any, ...], content: bytes) -> None:
        self.slots = bytearray(content)
        count = len(content) // _SLOT
        base = ctypes.addressof((ctypes.c_char * len(content)).from_buffer(self.slots))
        places = range(base, base + _SLOT * count, _SLOT)
        self._head = head
        # byref makes the C value here, once.
        self._params = ctypes.byref((ctypes.c_void_p * count)(*places))
        self.turn_to(0)

    def turn_to(self, stream: int) -> None:
        self.stream = stream
        self.arguments = (*self._head, _pointer(stream), self._params, None)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and not tensor.data_ptr() & _MISALIGNED:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
