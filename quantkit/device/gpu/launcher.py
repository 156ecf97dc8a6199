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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantkit.device.gpu.kernel import Plan
from quantkit.device.gpu.tensor_maps import MAP_BYTES, encode_map
from quantkit.device.hopper import TensorMap

if TYPE_CHECKING:
    from quantkit.device.gpu.devices import Device

_SLOT = 8
#: Kernels move 16 bytes at a time.
_MISALIGNED = 0xF
#: Addresses whose tensor maps a launch keeps, per operand: far more than a pipeline's layers.
_MOST_MAPS = 4096

_pointer = ctypes.c_void_p.from_param
_address = Tensor.data_ptr
_contiguous = Tensor.is_contiguous
_number = int.from_bytes


class Launcher:
    """A kernel on one device with its grid and numbers fixed; may be called from any thread."""

    __slots__ = (
        "_count",
        "_current",
        "_device",
        "_entry",
        "_free",
        "_head",
        "_index",
        "_maps",
        "_mask",
        "_pack",
        "_places",
        "_select",
        "_stream",
        "_symbol",
        "_tail",
    )

    def __init__(
        self,
        device: "Device",
        function: int,
        symbol: str,
        plan: Plan,
        nulls: Sequence[int] = (),
    ) -> None:
        """Prepare a launch.

        Args:
            device: where the operands lie.
            function: handle of the kernel, loaded on ``device``.
            symbol: the kernel's name, for errors.
            plan: everything but the addresses.
            nulls: which operands are null.
        """
        pointers, numbers = plan.pointers, plan.numbers
        self._device, self._index, self._symbol = device, device.index, symbol
        self._current, self._stream = device.current, device.stream
        self._entry = device.driver.launch_kernel
        self._head = (_pointer(function), *plan.grid, plan.block, 1, 1, plan.shared_bytes)
        present = [i for i in range(pointers) if i not in nulls]
        self._select: Any = itemgetter(*present) if nulls else tuple
        # Pad bytes are written as zeros: a null pointer.
        layout = "".join("Q" if i in present else "8x" for i in range(pointers))
        self._pack = struct.Struct(f"<{layout}").pack_into
        self._mask = sum(_MISALIGNED << 8 * _SLOT * i for i in range(pointers))
        head = bytes(_SLOT * pointers) + b"".join(struct.pack("<q", n) for n in numbers)
        starts = [len(head) + MAP_BYTES * i for i in range(len(plan.maps))]
        self._tail = head + bytes(MAP_BYTES * len(starts))
        self._maps = tuple(
            _Maps(present.index(operand), slice(start, start + MAP_BYTES), spec, {})
            for start, (operand, spec) in zip(starts, plan.maps, strict=True)
            if spec
        )
        slots = [*range(0, len(head), _SLOT), *starts]
        self._count = pointers
        self._places = tuple(slots[i] for i in plan.order)
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
            block = _Block(self._head, self._tail, self._places, self._count)
        slots = block.slots
        addresses = tuple(map(_address, tensors))
        self._pack(slots, 0, *addresses)
        if _number(block.pointers, "little") & self._mask or not all(map(_contiguous, tensors)):
            # The copies may be freed at once: torch reuses memory in the order of the stream.
            copies = [_plain(tensor) for tensor in tensors]
            addresses = tuple(map(_address, copies))
            self._pack(slots, 0, *addresses)
        for operand, place, spec, known in self._maps:
            address = addresses[operand]
            slots[place] = known.get(address) or self._encode(spec, known, address)
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

    def _encode(self, spec: TensorMap, known: dict[int, bytes], address: int) -> bytes:
        driver = self._device.driver
        assert driver.tensors
        status, content = encode_map(driver.tensors.encode, spec, address)
        if status in driver.unbound:
            driver.bind(self._index)
            status, content = encode_map(driver.tensors.encode, spec, address)
        driver.check(f"describe {spec.operand} to the copy engine", status, self._symbol)
        if len(known) >= _MOST_MAPS:
            known.clear()
        known[address] = content
        return content

    def _again(self, status: int, block: "_Block") -> None:
        driver = self._device.driver
        if status in driver.unbound:
            # A thread that torch has not used yet.
            driver.bind(self._index)
            status = self._entry(*block.arguments)
        driver.check("launch the kernel", status, self._symbol)


class _Maps(NamedTuple):
    """The tensor maps of one operand, one for each address that it had."""

    #: among the operands that are not null
    operand: int
    #: of the map in a block's slots
    place: slice
    spec: TensorMap
    #: address -> map. Encoding takes longer than everything else here together.
    known: dict[int, bytes]


class _Block:
    """Memory for the arguments of one launch under way, and the driver's arguments around it."""

    __slots__ = ("_head", "_params", "arguments", "pointers", "slots", "stream")

    def __init__(
        self, head: tuple[Any, ...], content: bytes, places: Sequence[int], pointers: int
    ) -> None:
        self.slots = bytearray(content)
        self.pointers = memoryview(self.slots)[: _SLOT * pointers]
        base = ctypes.addressof((ctypes.c_char * len(content)).from_buffer(self.slots))
        addresses = (base + place for place in places)
        self._head = head
        # byref makes the C value here, once.
        self._params = ctypes.byref((ctypes.c_void_p * len(places))(*addresses))
        self.turn_to(0)

    def turn_to(self, stream: int) -> None:
        self.stream = stream
        self.arguments = (*self._head, _pointer(stream), self._params, None)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and not tensor.data_ptr() & _MISALIGNED:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
