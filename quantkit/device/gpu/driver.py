"""The part of a GPU's driver that the loader needs; driver_cuda and driver_hip fill it in.

The two vendors' module interfaces have the same functions in the same order of arguments, so that
what is written here runs on both.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from quantkit.device.gpu.rtc import RuntimeCompiler
from quantkit.errors import CompilerMissingError, KernelError

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MAX_DYNAMIC_SHARED = 8

#: A function of a driver: any arguments, and a status of which 0 is success.
Entry = Callable[..., int]


@dataclass(frozen=True)
class TensorEntries:
    """Driver functions for kernels with tensor maps, besides those of modules."""

    #: cuFuncSetAttribute: (function, attribute, value)
    set_attribute: Entry
    #: cuTensorMapEncodeTiled, as ``tensor_maps`` calls it
    encode: Entry


@dataclass(frozen=True)
class Driver:
    """A loaded driver library and its run-time compiler."""

    #: CUDA or HIP
    name: str
    path: str
    #: of the driver or its runtime; part of the cache's key, since it may carry the compiler
    version: str
    #: the compiler, or the reason why there is none; prebuilt objects run without
    compiler: RuntimeCompiler | str
    #: target -> options of the compiler
    options: Callable[[str], tuple[str, ...]]
    #: of object files
    suffix: str
    #: (module*, image)
    module_load_data: Entry
    #: (function*, module, name)
    module_get_function: Entry
    #: (function, grid x, y, z, block x, y, z, LDS bytes, stream, parameters, extra)
    launch_kernel: Entry
    #: status -> its name and meaning
    explain: Callable[[int], str]
    #: make a device the calling thread's; (device index)
    bind: Callable[[int], None]
    #: what ``launch_kernel`` returns in a thread that no device is bound to
    unbound: frozenset[int]
    #: None where the driver has no tensor maps
    tensors: TensorEntries | None = None
    #: (launch of ``overlap``, function, parameters, extra); None where kernels cannot overlap
    launch_overlapping: Entry | None = None

    @property
    def compiler_identity(self) -> str:
        """The compiler's identity, for the cache's key.

        Raises:
            CompilerMissingError: there is none.
        """
        compiler = self.require_compiler()
        return f"{compiler.name} {compiler.version}, {self.name} {self.version}"

    def require_compiler(self) -> RuntimeCompiler:
        """Return the compiler.

        Raises:
            CompilerMissingError: there is none.
        """
        if isinstance(self.compiler, str):
            raise CompilerMissingError(self.compiler)
        return self.compiler

    def load_function(self, image: bytes, symbol: str) -> int:
        """Load an object on the calling thread's device and return the handle of its kernel.

        Modules are never unloaded: a captured graph may still launch their kernels.

        Raises:
            KernelError: the driver refuses the object, or there is no such kernel in it.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check("load the object", self.module_load_data(ctypes.byref(module), image), symbol)
        status = self.module_get_function(ctypes.byref(function), module, symbol.encode())
        self.check("find the kernel", status, symbol)
        assert function.value
        return function.value

    def allow_shared(self, function: int, size: int, symbol: str) -> None:
        """Let the blocks of a kernel have ``size`` bytes of dynamic shared memory.

        Raises:
            KernelError: the driver refuses.
        """
        assert self.tensors
        status = self.tensors.set_attribute(ctypes.c_void_p(function), _MAX_DYNAMIC_SHARED, size)
        self.check(f"give a block {size} bytes of shared memory", status, symbol)

    def check(self, what: str, status: int, symbol: str) -> None:
        """Raise KernelError when ``status`` is not success."""
        if status:
            raise KernelError(f"{symbol}: {self.name} cannot {what}: {self.explain(status)}")
