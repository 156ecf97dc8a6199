"""AMD: the module API of the HIP runtime, and hipRTC.

The runtime must be the very library that torch has loaded: another copy knows neither torch's
streams nor its memory.
"""

import ctypes
import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from quantkit.device.gpu.driver import Driver
from quantkit.device.gpu.rtc import RuntimeCompiler, open_compiler
from quantkit.errors import KernelError

# Statuses of hipError_t.
_NOT_INITIALIZED, _INVALID_CONTEXT = 3, 201

_WINDOWS = sys.platform == "win32"
#: File names in a folder, newest first when sorted backwards, and names that the system resolves.
_PATTERNS = {
    "amdhip64": ("amdhip64*.dll",) if _WINDOWS else ("libamdhip64.so*",),
    # Not hiprtc-builtins.
    "hiprtc": ("hiprtc[0-9]*.dll",) if _WINDOWS else ("libhiprtc.so*",),
}


def hiprtc_options(target: str) -> tuple[str, ...]:
    """Return the options that every kernel is compiled with; as ``kernels build`` has them."""
    return (f"--offload-arch={target}", "-O3", "-std=c++17", "-ffp-contract=off", "-mcumode")


@lru_cache(maxsize=1)
def load_hip() -> Driver:
    """Return AMD's runtime.

    Raises:
        KernelError: it is not installed.
    """
    path, library = _open_runtime()
    version = ctypes.c_int()
    library.hipRuntimeGetVersion(ctypes.byref(version))
    return Driver(
        name="HIP",
        path=path,
        version=str(version.value),
        compiler=_compiler(path),
        options=hiprtc_options,
        suffix="co",
        module_load_data=library.hipModuleLoadData,
        module_get_function=library.hipModuleGetFunction,
        launch_kernel=library.hipModuleLaunchKernel,
        explain=_Explain(library),
        bind=_Bind(library),
        unbound=frozenset({_NOT_INITIALIZED, _INVALID_CONTEXT}),
    )


def candidates(stem: str) -> Iterator[str]:
    """Yield where ``amdhip64`` or ``hiprtc`` may be, the copy that torch uses first."""
    yield from _mapped(stem)
    for folder in _folders():
        for pattern in _PATTERNS[stem]:
            # libamdhip64.so is the link that the distributor keeps; else the newest version.
            found = sorted(folder.glob(pattern), reverse=True)
            yield from map(str, sorted(found, key=lambda path: path.suffix != ".so"))
    if name := ctypes.util.find_library(stem):
        yield name


def _open_runtime() -> tuple[str, ctypes.CDLL]:
    for path in candidates("amdhip64"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(library, "hipModuleLaunchKernel"):
            return path, library
    raise KernelError(
        "libamdhip64: not in this process, torch's lib folder, a rocm_sdk wheel, $ROCM_PATH or the "
        "library path; install PyTorch for ROCm"
    )


def _compiler(runtime: str) -> RuntimeCompiler | str:
    # Linux distributions may have hipRTC inside the runtime library.
    for path in (*candidates("hiprtc"), runtime):
        try:
            return open_compiler("hipRTC", "hiprtc", "Code", path)
        except (OSError, AttributeError):  # noqa: PERF203  a handful of names
            continue
    return (
        "libhiprtc: not in torch's lib folder, a rocm_sdk wheel, $ROCM_PATH or the library path; "
        "install it, or 'quantkit[radeon]', or set QUANTKIT_OBJECTS to a folder of 'quantkit "
        "kernels build'"
    )


def _folders() -> Iterator[Path]:
    for package, places in (("torch", ("lib",)), ("_rocm_sdk_core", ("lib", "bin"))):
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            yield from (Path(root) / place for place in places)
    for variable in ("ROCM_PATH", "HIP_PATH"):
        if root := os.environ.get(variable, "").strip():
            yield from (Path(root) / "lib", Path(root) / "bin")
    yield Path("/opt/rocm/lib")
    if _WINDOWS:
        # AMD's driver brings a runtime.
        yield Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32")


def _mapped(stem: str) -> Iterator[str]:
    """Yield the library that this process has loaded already (Linux tells)."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    paths = (line.split(maxsplit=5)[5] for line in lines if f"/lib{stem}.so" in line)
    yield from dict.fromkeys(paths)


class _Explain:
    """Status to text."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = (library.hipGetErrorName, library.hipGetErrorString)
        for function in self._functions:
            function.restype = ctypes.c_char_p

    def __call__(self, status: int) -> str:
        name, text = (f(status).decode(errors="replace") for f in self._functions)
        return f"{status} {name}: {text}"


class _Bind:
    """Makes a device the calling thread's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, device: int) -> None:
        status = self._library.hipSetDevice(device)
        if status:
            raise KernelError(f"hipSetDevice: {_Explain(self._library)(status)}")
