"""The compiled core of packing and verifying: one library of the sources of kernels/host."""

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

from quantkit.device.host.compiling import base_command, open_library
from quantkit.errors import KernelError
from quantkit.resources import kernel_sources

_log = logging.getLogger(__name__)

_SOURCES = ("encode.cpp", "check.cpp", "observe.cpp", "sha256.cpp")


@lru_cache(maxsize=1)
def why_unavailable() -> str:
    """Return why this machine has no compiled core; empty when it has. Compiles at first use."""
    try:
        library()
    except KernelError as error:
        _log.info("packing in PyTorch: %s", error)
        return str(error)
    return ""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the library; its functions run without Python's lock.

    Raises:
        KernelError: there is no compiler, or it failed.
    """
    return open_library("core.so", _command)


def _command(output: Path) -> list[str]:
    folder = kernel_sources() / "host"
    return [*base_command(), "-shared", "-o", str(output), *(str(folder / s) for s in _SOURCES)]
