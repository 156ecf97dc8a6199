"""The core of packing, compiled for this machine: rows to scales, codes and metadata."""

import ctypes
from collections.abc import Callable
from functools import lru_cache

from quantkit.device.host import core

#: Why this machine has no compiled core; empty when it has.
why_unavailable = core.why_unavailable

#: Numbers that rows may be stored in, by their names in a safetensors header: the order is the
#: core's.
SOURCES = ("F16", "BF16", "F32")
#: Formats that it encodes, in its order.
FORMATS = ("e4m3fn", "e5m2", "int8", "int4")
#: What it returns when nothing is wrong, when there is no memory, and when smoothing overflows.
DONE, _NO_MEMORY, OVERFLOW = -1, -2, -3

_ADDRESSES = (
    "source", "importance", "columns", "fractions",
    "scale", "factors", "codes", "meta", "amax", "column_amax", "errors",
)  # fmt: skip
_SIZES = ("rows", "channels", "taps", "group", "tries")
_CHOICES = ("dtype", "format", "sparse", "pow2")


class Job(ctypes.Structure):
    """The struct of the same name in kernels/host/encode.cpp, which explains it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _CHOICES),
    )


def encode_rows(job: Job) -> int:
    """Do a job, without Python's lock.

    Args:
        job: its addresses are of memory of the sizes that encode.cpp says.

    Returns:
        DONE, OVERFLOW, or the index, as stored, of the first number that is NaN or infinite.

    Raises:
        KernelError: the compiler failed.
        MemoryError: there is none for a row.
    """
    found = _function()(ctypes.byref(job))
    if found == _NO_MEMORY:
        raise MemoryError("encode_rows")
    return found


@lru_cache(maxsize=1)
def _function() -> Callable[..., int]:
    function = core.library().qk_encode_rows
    function.restype = ctypes.c_int64
    function.argtypes = (ctypes.POINTER(Job),)
    return function


def address(buffer: bytearray | memoryview) -> int:
    """Return where a buffer that can be written to begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
