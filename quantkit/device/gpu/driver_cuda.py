"""NVIDIA: the driver API of libcuda, and NVRTC from torch's wheels."""

import ctypes
import sys
from functools import lru_cache

from quantkit.device.gpu import tensor_maps
from quantkit.device.gpu.driver import Driver, TensorEntries
from quantkit.device.gpu.nvrtc import load_nvrtc, nvrtc_options
from quantkit.device.gpu.rtc import RuntimeCompiler
from quantkit.errors import CompilerMissingError, KernelError

# Statuses of CUresult.
_NOT_INITIALIZED, _INVALID_CONTEXT, _DESTROYED = 3, 201, 709


@lru_cache(maxsize=1)
def load_cuda() -> Driver:
    """Return NVIDIA's driver.

    Raises:
        KernelError: it is not installed.
    """
    path = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise KernelError(f"{path}: cannot be loaded ({error}); install NVIDIA's driver") from error
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return Driver(
        name="CUDA",
        path=path,
        version=f"{version.value // 1000}.{version.value % 1000 // 10}",
        compiler=_compiler(),
        options=nvrtc_options,
        suffix="cubin",
        module_load_data=library.cuModuleLoadData,
        module_get_function=library.cuModuleGetFunction,
        launch_kernel=library.cuLaunchKernel,
        explain=_Explain(library),
        bind=_Bind(library),
        unbound=frozenset({_NOT_INITIALIZED, _INVALID_CONTEXT, _DESTROYED}),
        tensors=_tensor_entries(library),
        # Drivers before CUDA 11.8 have none.
        launch_overlapping=getattr(library, "cuLaunchKernelEx", None),
    )


def _tensor_entries(library: ctypes.CDLL) -> TensorEntries | None:
    # Drivers before CUDA 12.0 have none.
    if not hasattr(library, "cuTensorMapEncodeTiled"):
        return None
    encode = library.cuTensorMapEncodeTiled
    encode.argtypes = tensor_maps.ENCODE_TYPES
    return TensorEntries(library.cuFuncSetAttribute, encode)


def _compiler() -> RuntimeCompiler | str:
    try:
        return load_nvrtc()
    except CompilerMissingError as error:
        return str(error)


class _Explain:
    """Status to text."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, status: int) -> str:
        texts = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            function(status, ctypes.byref(text))
            texts.append((text.value or b"").decode(errors="replace"))
        return f"{status} {texts[0]}: {texts[1]}"


class _Bind:
    """Makes a device's primary context, which is torch's, current in the calling thread.

    torch.cuda.set_device would not: it does nothing when the device is the thread's already, which
    device 0 is in a new thread, though no context is current there yet.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def __call__(self, device: int) -> None:
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(handle), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._library, function)(*args)
        if status:
            raise KernelError(f"{function}: {_Explain(self._library)(status)}")
