"""Encoding tensor maps for Hopper's copy engine by cuTensorMapEncodeTiled.

A map is 128 opaque bytes that hold the tensor's address, and is passed by value.
"""

import ctypes
from collections.abc import Callable
from operator import mul

from quantkit.device.hopper.tensormap import TensorMap

MAP_BYTES = 128
_ALIGNMENT = 64

# CUtensorMapDataType, _Swizzle and _L2promotion of cuda.h; interleave none and out-of-bounds fill
# with zeros are 0.
_ELEMENTS = {"u8": 0, "f16": 6, "f32": 7, "bf16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_L2_256 = 3

#: map, element, rank, address, sizes, pitches, box, steps, interleave, swizzle, promotion, fill
ENCODE_TYPES = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    *(ctypes.c_void_p,) * 5,
    *(ctypes.c_int,) * 4,
)


def encode_map(encode: Callable[..., int], spec: TensorMap, address: int) -> tuple[int, bytes]:
    """Return the status and the map of the tensor at ``address``.

    Args:
        encode: cuTensorMapEncodeTiled, with ``ENCODE_TYPES``.
        spec: what the map describes.
        address: of device memory, a multiple of 16.
    """
    room = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    place = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    rank = len(spec.sizes)
    steps = spec.steps or (1,) * rank
    sizes = (ctypes.c_uint64 * rank)(*spec.sizes)
    pitches = (ctypes.c_uint64 * (rank - 1))(*spec.pitches)
    # The driver counts the elements that steps leave out, too.
    box = (ctypes.c_uint32 * rank)(*map(mul, spec.box, steps))
    strides = (ctypes.c_uint32 * rank)(*steps)
    modes = (0, _SWIZZLES[spec.swizzle], _L2_256, 0)
    element = _ELEMENTS[spec.element]
    status = encode(place, element, rank, address, sizes, pitches, box, strides, *modes)
    return status, ctypes.string_at(place, MAP_BYTES)
