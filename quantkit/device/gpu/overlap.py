"""Launches whose blocks may start before the kernel ahead has ended: NVIDIA's, from 9.0 on.

The driver calls it programmatic stream serialization: the launch, and what blocks do before they
touch memory, take place under the end of the kernel ahead. A kernel has to wait for that one itself
(``wait_for_previous`` in platform.h), so the machine code is asked whether it does. A stream that
is captured keeps it in the graph.
"""

import ctypes

from quantkit.device.aot.elf import read_sections
from quantkit.device.gpu.kernel import Plan

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_PROGRAMMATIC = 6
#: An instruction of sm_90 to sm_121, and its opcode: the low bits. griddepcontrol.wait is ACQBULK.
_INSTRUCTION, _OPCODE, _WAIT = 16, 0xFFF, 0x82E


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_int * 16),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: what cuLaunchKernelEx takes beside the kernel and its parameters."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def overlapping(plan: Plan) -> LaunchConfig:
    """Return the launch of a kernel that waits for those ahead, on stream 0."""
    attribute = _Attribute(_PROGRAMMATIC, 0, (1,))
    block = (plan.block, 1, 1)
    # The pointer keeps the attribute alive.
    return LaunchConfig(plan.grid, block, plan.shared_bytes, None, ctypes.pointer(attribute), 1)


def waits(cubin: bytes, symbol: str) -> bool:
    """Tell whether a kernel waits for those ahead of it.

    Args:
        cubin: its object.
        symbol: its name there.

    Raises:
        ValueError: the object is damaged.
    """
    codes = [s.content for s in read_sections(cubin) if s.name == f".text.{symbol}"]
    return any(
        int.from_bytes(code[at : at + 2], "little") & _OPCODE == _WAIT
        for code in codes
        for at in range(0, len(code), _INSTRUCTION)
    )
