"""Looking at stored numbers and packed codes, compiled for this machine."""

import ctypes
from functools import lru_cache

from quantkit.device.host import core
from quantkit.device.host.encoder import DONE, address

#: Why this machine has no compiled core; empty when it has.
why_unavailable = core.why_unavailable

#: Numbers that are looked at, by their names in a safetensors header: the order is check.cpp's.
NUMBERS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
#: Codes a byte each, and pairs of nibbles with factors, in its order.
CODES = ("e4m3fn", "e5m2", "int8", "int4")
#: What is wrong with codes, a bit each.
BAD_FACTOR, BAD_CODE, BAD_META, BAD_SCALE = 1, 2, 4, 8

_ADDRESSES = ("codes", "meta", "factors", "scale")
_SIZES = ("rows", "row_bytes", "meta_bytes", "row_factors", "groups")


class Check(ctypes.Structure):
    """The struct of the same name in kernels/host/check.cpp, which explains it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("found", ctypes.c_float),
        ("largest", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )


def first_broken(
    numbers: memoryview | bytearray, dtype: str, *, positive: bool = False
) -> int | None:
    """Return the index of the first number that is NaN or infinite; None when there is none.

    Args:
        numbers: their bytes, that can be written to.
        dtype: one of ``NUMBERS``.
        positive: zero and what is below it are broken, too.

    Raises:
        KernelError: the compiler failed.
    """
    if not len(numbers):
        return None
    kind = NUMBERS.index(dtype)
    found = _first_broken()(address(numbers), len(numbers) // _BYTES[kind], kind, positive)
    return None if found == DONE else int(found)


def check_codes(job: Check) -> int:
    """Return what is wrong with rows of a packed weight: bits of ``BAD_FACTOR`` and so on.

    Args:
        job: its addresses are of memory of the sizes that check.cpp says.

    Raises:
        KernelError: the compiler failed.
    """
    return int(_check_codes()(ctypes.byref(job)))


#: Of the numbers.
_BYTES = (2, 2, 4, 8, 1, 1)


@lru_cache(maxsize=1)
def _first_broken() -> "ctypes._NamedFuncPointer":
    function = core.library().qk_first_broken
    function.restype = ctypes.c_int64
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
    return function


@lru_cache(maxsize=1)
def _check_codes() -> "ctypes._NamedFuncPointer":
    function = core.library().qk_check_codes
    function.restype = ctypes.c_int32
    function.argtypes = (ctypes.POINTER(Check),)
    return function
