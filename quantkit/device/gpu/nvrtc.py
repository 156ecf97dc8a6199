"""NVRTC, from the wheel that torch depends on: compiles for NVIDIA without a GPU."""

import ctypes.util
import importlib.util
import os
from functools import lru_cache
from pathlib import Path

from quantkit.device.gpu.rtc import RuntimeCompiler, open_compiler
from quantkit.errors import CompilerMissingError


def nvrtc_options(target: str) -> tuple[str, ...]:
    """Return the options that every kernel is compiled with for ``target``."""
    return (f"--gpu-architecture={target}", "-std=c++17", "-default-device")


@lru_cache(maxsize=1)
def load_nvrtc() -> RuntimeCompiler:
    """Return the newest NVRTC of the installed wheels, else the system's.

    Raises:
        CompilerMissingError: there is none.
    """
    for path in (*_wheel_libraries(), *filter(None, [ctypes.util.find_library("nvrtc")])):
        try:
            return open_compiler("NVRTC", "nvrtc", "CUBIN", path)
        except OSError:  # noqa: PERF203  a handful of names
            continue
    raise CompilerMissingError(
        "NVIDIA targets: libnvrtc is neither in an nvidia wheel nor on the library path; "
        "install nvidia-cuda-nvrtc"
    )


def _wheel_libraries() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    if spec is None or not spec.submodule_search_locations:
        return []
    # On Windows, wheels keep libraries in bin, named nvrtc64_130_0.dll.
    patterns = ("*/lib/libnvrtc.so.*", "*/bin/nvrtc64_*.dll", "*/bin/*/nvrtc64_*.dll")
    found = [
        path
        for root in spec.submodule_search_locations
        for pattern in patterns
        for path in Path(root).glob(pattern)
        if "alt" not in path.name
    ]
    return [os.fspath(path) for path in sorted(found, reverse=True)]
