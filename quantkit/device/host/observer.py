"""Calibration statistics of an input in one pass, compiled for this machine."""

import ctypes
from collections.abc import Callable
from functools import lru_cache

from quantkit.device.host import core

#: Why this machine has no compiled core; empty when it has.
why_unavailable = core.why_unavailable

_ADDRESSES = ("x", "amax", "sums", "squares", "counts")
_SIZES = ("outer", "channels", "inner")


class Observe(ctypes.Structure):
    """The struct of the same name in kernels/host/observe.cpp, which explains it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("threads", ctypes.c_int32),
    )


def observe(job: Observe) -> None:
    """Do a job, without Python's lock.

    Args:
        job: its addresses are of memory of the sizes that observe.cpp says.

    Raises:
        KernelError: the compiler failed.
    """
    _function()(ctypes.byref(job))


@lru_cache(maxsize=1)
def _function() -> Callable[..., None]:
    function = core.library().qk_observe
    function.restype = None
    function.argtypes = (ctypes.POINTER(Observe),)
    return function
