"""The GPUs of this machine, with the loader of each, or the reason that there is none."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.device.archs import Arch, arch_of_device
from quantkit.device.gpu.driver import Driver
from quantkit.device.gpu.kernel import Kernel
from quantkit.device.gpu.objects import pass_over, read_object
from quantkit.device.gpu.overlap import waits
from quantkit.errors import KernelError


class Function(NamedTuple):
    """A kernel that is loaded on a device."""

    handle: int
    #: it may start before the kernel ahead of it has ended, and waits for that one
    overlaps: bool


class Memory(NamedTuple):
    """torch's allocator, of the calling thread's device: what its own compiled code calls.

    ``torch.empty`` and its like take twice as long: they ask a dispatcher who they are meant for.
    """

    #: (shape, strides, dtype) -> a tensor
    new: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
    #: (bytes, stream) -> an address; once given back, whatever the stream does later may have it
    take: Callable[[int, int], int]
    #: (address)
    give_back: Callable[[int], None]


@dataclass(frozen=True)
class Device:
    """One GPU that kernels may run on."""

    index: int
    #: gcnArchName, or sm_ and the compute capability; never the marketing name
    name: str
    arch: Arch
    driver: Driver
    #: compute units, over which the blocks of a grid are spread
    units: int
    torch_device: torch.device
    #: what torch knows: the calling thread's device, a device's current stream, whether a graph is
    #: being captured, and a block with another device
    current: Callable[[], int]
    stream: Callable[[int], int]
    capturing: Callable[[], bool]
    guard: Callable[[int], AbstractContextManager[object]]
    memory: Memory
    _functions: dict[Kernel, Function] = field(default_factory=dict, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    @property
    def target(self) -> str:
        """The target of kernels: the architecture, in the compiler's spelling."""
        return self.arch.target_for(self.name)

    def function(self, kernel: Kernel, shared_bytes: int) -> Function:
        """Return a kernel, which is read, compiled and loaded when it is new.

        Args:
            shared_bytes: dynamic shared memory of its blocks.

        Raises:
            KernelError: it cannot be compiled or loaded, or a graph is being captured.
        """
        function = self._functions.get(kernel)
        if function is None:
            with self._lock:
                function = self._functions.get(kernel) or self._load(kernel, shared_bytes)
                self._functions[kernel] = function
        return function

    def _load(self, kernel: Kernel, shared_bytes: int) -> Function:
        if self.capturing():
            raise KernelError(
                f"{kernel.symbol}: is not loaded yet, and nothing can be loaded while a graph is "
                "captured; run the model once before capturing"
            )
        found = read_object(self.driver, self.target, kernel)
        with self.guard(self.index):
            self.driver.bind(self.index)
            try:
                function = self.driver.load_function(found.content, kernel.symbol)
            except KernelError as error:
                # A copied or damaged cache: compile again rather than fail for ever. What was built
                # ahead of time for this very device is not ours to replace.
                if not found.prebuilt:
                    found.path.unlink(missing_ok=True)
                elif not pass_over(found, self.target, str(error)):
                    raise
                found = read_object(self.driver, self.target, kernel)
                function = self.driver.load_function(found.content, kernel.symbol)
            if shared_bytes:
                self.driver.allow_shared(function, shared_bytes, kernel.symbol)
        can = self.driver.launch_overlapping is not None
        return Function(function, can and waits(found.content, kernel.symbol))


@lru_cache(maxsize=64)
def find_device(index: int) -> Device:
    """Return the GPU that torch calls ``cuda:index``.

    Raises:
        KernelError: torch sees no such GPU, there are no kernels for it, or its driver is missing.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise KernelError(f"cuda:{index}: torch sees {torch.cuda.device_count()} GPUs")
    properties = torch.cuda.get_device_properties(index)
    name = device_name(properties)
    arch = arch_of_device(name)
    return Device(
        index=index,
        name=name,
        arch=arch,
        driver=_load_driver(),
        units=properties.multi_processor_count * arch.units,
        torch_device=torch.device("cuda", index),
        current=torch._C._cuda_getDevice,  # noqa: SLF001  as below
        # torch.cuda.current_stream builds an object, which takes longer than the launch.
        stream=torch._C._cuda_getCurrentRawStream,  # noqa: SLF001  torch.compile's code calls it
        capturing=torch.cuda.is_current_stream_capturing,
        guard=torch.cuda.device,
        memory=Memory(
            torch._C._dynamo.guards._empty_strided_cuda,  # type: ignore[attr-defined]  # noqa: SLF001  torch.compile's code calls it
            torch._C._cuda_cudaCachingAllocator_raw_alloc,  # noqa: SLF001  torch.cuda.caching_allocator_alloc
            torch._C._cuda_cudaCachingAllocator_raw_delete,  # noqa: SLF001  as above
        ),
    )


def device_name(properties: Any) -> str:
    """Return what a GPU executes: gfx1201, sm_90.

    gcnArchName may carry features behind a colon (gfx90a:sramecc+:xnack-).
    """
    arch: str = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return arch.split(":", maxsplit=1)[0] or f"sm_{properties.major}{properties.minor}"


def _load_driver() -> Driver:
    if torch.version.hip:
        from quantkit.device.gpu.driver_hip import load_hip

        return load_hip()
    from quantkit.device.gpu.driver_cuda import load_cuda

    return load_cuda()
