"""Launching one kernel: everything that does not change between calls is prepared once.

What is left per call are the addresses of the operands. The steps are C functions that take and
return ready values (struct, map over tensor methods, ctypes values made beforehand): a loop in
Python over the operands alone would take longer than the driver takes to queue a kernel.
"""

import ctypes
import struct
from collections import deque
from collections.abc import Sequence
from functools import partial, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.device.gpu.devices import Device, Function
from quantkit.device.gpu.driver import Driver, Entry
from quantkit.device.gpu.kernel import Kernel, Plan, plan_of
from quantkit.device.gpu.overlap import overlapping
from quantkit.device.gpu.tensor_maps import MAP_BYTES, encode_map
from quantkit.device.hopper.tensormap import TensorMap
from quantkit.device.ops.op import Sizes

_SLOT = 8
#: Kernels move 16 bytes at a time.
_MISALIGNED = 0xF
#: Addresses whose tensor maps a launch keeps: more than a pipeline has layers of one shape.
_MOST_MAPS = 1024

_pointer = ctypes.c_void_p.from_param
_address = Tensor.data_ptr
_contiguous = Tensor.is_contiguous


class Launcher:
    """A kernel on one device with its grid and numbers fixed; may be called from any thread."""

    __slots__ = (
        "_device",
        "_entry",
        "_free",
        "_known",
        "_maps",
        "_maps_at",
        "_new_block",
        "_pack",
        "_pick",
        "_select",
        "_stream",
        "_symbol",
    )

    def __init__(
        self,
        device: Device,
        function: Function,
        symbol: str,
        plan: Plan,
        nulls: Sequence[int] = (),
    ) -> None:
        """Prepare a launch.

        Args:
            device: where the operands lie.
            function: the kernel, loaded on ``device``.
            symbol: the kernel's name, for errors.
            plan: everything but the addresses.
            nulls: which operands are null.
        """
        pointers, numbers = plan.pointers, plan.numbers
        self._device, self._stream, self._symbol = device, device.stream, symbol
        self._entry = _entry_of(device.driver, function)
        present = [i for i in range(pointers) if i not in nulls]
        self._select: Any = itemgetter(*present) if nulls else tuple
        # Pad bytes are written as zeros: a null pointer.
        layout = "".join("Q" if i in present else "8x" for i in range(pointers))
        self._pack = struct.Struct(f"<{layout}").pack_into
        head = bytes(_SLOT * pointers) + b"".join(struct.pack("<q", n) for n in numbers)
        starts = [len(head) + MAP_BYTES * i for i in range(len(plan.maps))]
        content = head + bytes(MAP_BYTES * len(starts))
        described = [(operand, spec) for operand, spec in plan.maps if spec]
        # One that the kernel does not read stands last.
        assert all(spec for _, spec in plan.maps[: len(described)])
        self._maps = tuple(_Maps(spec, {}) for _, spec in described)
        self._pick: Any = itemgetter(*(operand for operand, _ in described)) if described else None
        self._maps_at = slice(len(head), len(head) + MAP_BYTES * len(described))
        #: addresses of the described operands -> their maps
        self._known: dict[tuple[int, ...], bytes] = {}
        slots = [*range(0, len(head), _SLOT), *starts]
        places = tuple(slots[i] for i in plan.order)
        self._new_block = partial(Block, function, plan, content, places)
        # Parameter blocks that no thread is using. Both ends of a deque are safe without a lock.
        self._free: deque[Block] = deque()

    def __call__(self, *operands: Tensor | None) -> None:
        """Queue the kernel on the current stream of its device, which is the calling thread's.

        Args:
            operands: in launch order, None where it was said to be null. Those that are not
                contiguous, or do not start on 16 bytes, are copied first.

        Raises:
            KernelError: the driver refuses.
        """
        tensors: tuple[Tensor, ...] = self._select(operands)
        addresses = tuple(map(_address, tensors))
        if reduce(or_, addresses, 0) & _MISALIGNED or not all(map(_contiguous, tensors)):
            # They may be freed behind the launch: torch reuses memory in the order of the stream.
            tensors = tuple(map(plain, tensors))
            addresses = tuple(map(_address, tensors))
        try:
            block = self._free.pop()
        except IndexError:
            block = self._new_block()
        self._pack(block.slots, 0, *addresses)
        self.queue(block, self._stream(self._device.index))
        # The driver has copied the parameters when it returns.
        self._free.append(block)

    def block(self, addresses: tuple[int, ...]) -> "Block":
        """Return a new block, for one who keeps it: all that ``queue`` wants is in it.

        Args:
            addresses: of the operands that are not null, in launch order. They are contiguous and
                start on 16 bytes. Those that are not known yet are put in ``Block.places`` later.
        """
        block = self._new_block()
        self._pack(block.slots, 0, *addresses)
        return block

    def queue(self, block: "Block", stream: int) -> None:
        """Queue the kernel on its device, which is the calling thread's.

        Args:
            block: no other thread has it.
            stream: of the device.

        Raises:
            KernelError: the driver refuses.
        """
        if self._pick and (described := self._pick(block.places)) != block.described:
            content = self._known.get(described) or self._describe(described)
            block.slots[self._maps_at] = content
            block.described = described
        if stream != block.stream:
            block.turn_to(stream)
        if status := self._entry(*block.arguments):
            self._again(status, block)

    def _describe(self, addresses: tuple[int, ...]) -> bytes:
        pairs = zip(self._maps, addresses, strict=True)
        content = b"".join(maps.known.get(a) or self._encode(maps, a) for maps, a in pairs)
        return _keep(self._known, addresses, content)

    def _encode(self, maps: "_Maps", address: int) -> bytes:
        driver = self._device.driver
        assert driver.tensors
        status, content = encode_map(driver.tensors.encode, maps.spec, address)
        if status in driver.unbound:
            driver.bind(self._device.index)
            status, content = encode_map(driver.tensors.encode, maps.spec, address)
        driver.check(f"describe {maps.spec.operand} to the copy engine", status, self._symbol)
        return _keep(maps.known, address, content)

    def _again(self, status: int, block: "Block") -> None:
        driver = self._device.driver
        if status in driver.unbound:
            # A thread that torch has not used yet.
            driver.bind(self._device.index)
            status = self._entry(*block.arguments)
        driver.check("launch the kernel", status, self._symbol)


def prepare_launch(
    device: Device, kernel: Kernel, sizes: Sizes, nulls: Sequence[int] = ()
) -> Launcher:
    """Return the launch of a kernel on a device, which loads it when it is new.

    Args:
        device: where the operands will lie.
        kernel: what is launched.
        sizes: what its numbers follow from.
        nulls: which arguments are null.

    Raises:
        KernelError: it cannot be compiled or loaded, or a graph is being captured.
    """
    plan = plan_of(kernel, sizes, device.units)
    function = device.function(kernel, plan.shared_bytes)
    return Launcher(device, function, kernel.symbol, plan, nulls)


def _entry_of(driver: Driver, function: Function) -> Entry:
    if not function.overlaps:
        return driver.launch_kernel
    assert driver.launch_overlapping
    return driver.launch_overlapping


class _Maps(NamedTuple):
    """The tensor maps of one operand, one for each address that it had."""

    spec: TensorMap
    #: address -> map. Encoding takes longer than everything else here together.
    known: dict[int, bytes]


def _keep(known: dict[Any, bytes], key: object, content: bytes) -> bytes:
    if len(known) >= _MOST_MAPS:
        known.clear()
    known[key] = content
    return content


class Block:
    """Memory for the arguments of one launch under way, and the driver's arguments around it."""

    __slots__ = (
        "_config",
        "_head",
        "_params",
        "arguments",
        "described",
        "places",
        "slots",
        "stream",
    )

    def __init__(
        self, function: Function, plan: Plan, content: bytes, places: Sequence[int]
    ) -> None:
        self.slots = bytearray(content)
        #: the operands' addresses, in launch order; 0 where one is null
        self.places = memoryview(self.slots)[: _SLOT * plan.pointers].cast("Q")
        #: addresses of which the slots hold the tensor maps
        self.described: tuple[int, ...] | None = None
        base = ctypes.addressof((ctypes.c_char * len(content)).from_buffer(self.slots))
        addresses = (base + place for place in places)
        self.arguments: tuple[Any, ...]
        kernel = _pointer(function.handle)
        self._head = (kernel, *plan.grid, plan.block, 1, 1, plan.shared_bytes)
        # byref makes the C value here, once.
        self._params = ctypes.byref((ctypes.c_void_p * len(places))(*addresses))
        self._config = overlapping(plan) if function.overlaps else None
        if self._config is not None:
            self.arguments = (ctypes.byref(self._config), kernel, self._params, None)
        self.turn_to(0)

    def turn_to(self, stream: int) -> None:
        """Say on which stream the launch will be."""
        self.stream = stream
        if self._config is not None:
            self._config.stream = stream
        else:
            self.arguments = (*self._head, _pointer(stream), self._params, None)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor that is contiguous and starts on 16 bytes; itself, where it does."""
    if tensor.is_contiguous() and not tensor.data_ptr() & _MISALIGNED:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
