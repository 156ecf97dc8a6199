"""Launching one kernel: everything that does not change between calls is packed once.

What is left per call are the addresses of the operands and the stream. The call into the driver
takes ready C values, because ctypes would spend more time on converting them than the driver on
queueing the kernel.
"""

import ctypes
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from quantkit.device.geometry import compile_expression, geometry_of
from quantkit.device.gpu.driver import Driver
from quantkit.device.ops import Variant
from quantkit.errors import KernelError

_SLOT = 8
_INT_MAX = 2**31 - 1


class Launcher:
    """A kernel on one device with its grid and numbers fixed; may be called from any thread."""

    __slots__ = (
        "_device",
        "_driver",
        "_entry",
        "_first_number",
        "_free",
        "_head",
        "_numbers",
        "_pack",
        "_symbol",
    )

    def __init__(
        self, driver: Driver, device: int, function: int, variant: Variant, sizes: dict[str, int]
    ) -> None:
        """Prepare a launch.

        Args:
            function: handle of the kernel, loaded on ``device``.
            sizes: m, n and k, or those that the operation has.

        Raises:
            KernelError: a size that a kernel's 32-bit integers do not hold.
        """
        geometry = geometry_of(variant)
        args = variant.op.args
        pointers = self._first_number = sum(a.is_pointer for a in args)
        # One format packs all addresses: numbers stand behind them in every kernel.
        assert all(a.is_pointer for a in args[:pointers])
        self._numbers = tuple(sizes[a.name] for a in args[pointers:])
        grid = [compile_expression(text)(sizes) for text in geometry.grid]
        if not all(0 < number <= _INT_MAX for number in (*self._numbers, *grid)):
            raise KernelError(f"{variant.symbol}: sizes {sizes} do not fit 32-bit integers")
        self._driver, self._device, self._symbol = driver, device, variant.symbol
        self._entry = driver.launch_kernel
        self._pack = struct.Struct(f"<{pointers}Q").pack_into
        handle = ctypes.c_void_p.from_param(function)
        self._head = (handle, *grid, geometry.block, 1, 1, 0)
        # Parameter blocks that no thread is using. Both ends of a deque are safe without a lock.
        self._free: deque[tuple[Any, Any]] = deque()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Queue the kernel.

        Args:
            addresses: of the operands in launch order; 0 is null.
            stream: the raw handle.

        Raises:
            KernelError: the driver refuses.
        """
        try:
            block = self._free.pop()
        except IndexError:
            block = self._new_block()
        slots, params = block
        self._pack(slots, 0, *addresses)
        status = self._entry(*self._head, _pointer(stream), params, None)
        if status:
            self._again(status, stream, params)
        # The driver has copied the parameters when it returns.
        self._free.append(block)

    def _again(self, status: int, stream: int, params: Any) -> None:
        if status in self._driver.unbound:
            # A thread that torch has not used yet.
            self._driver.bind(self._device)
            status = self._entry(*self._head, _pointer(stream), params, None)
        self._driver.check("launch the kernel", status, self._symbol)

    def _new_block(self) -> tuple[Any, Any]:
        """Return a buffer with a slot per argument, and a reference to their addresses."""
        first, count = self._first_number, self._first_number + len(self._numbers)
        slots = ctypes.create_string_buffer(_SLOT * count)
        for index, number in enumerate(self._numbers, start=first):
            struct.pack_into("<i", slots, _SLOT * index, number)
        base = ctypes.addressof(slots)
        places = range(base, base + _SLOT * count, _SLOT)
        # byref makes the C value here, once.
        return slots, ctypes.byref((ctypes.c_void_p * count)(*places))


_pointer = ctypes.c_void_p.from_param
