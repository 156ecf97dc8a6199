"""Tensor maps: what Hopper's copy engine knows of a matrix, made by cuTensorMapEncodeTiled.

A map is 128 opaque bytes that hold the matrix's address, and is passed by value.
"""

import ctypes
from collections.abc import Callable

from quantkit.device.hopper import TensorMap

MAP_BYTES = 128
_ALIGNMENT = 64

# CUtensorMapDataType, _Swizzle and _L2promotion of cuda.h; interleave none and out-of-bounds fill
# with zeros are 0.
_ELEMENTS = {"u8": 0, "f16": 6, "f32": 7, "bf16": 9}
_ITEM_BYTES = {"u8": 1, "f16": 2, "f32": 4, "bf16": 2}
_SWIZZLES = {64: 2, 128: 3}
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
    """Return the status and the map of the matrix at ``address``.

    Args:
        encode: cuTensorMapEncodeTiled, with ``ENCODE_TYPES``.
        spec: what the map describes.
        address: of device memory, a multiple of 16.
    """
    room = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    place = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(spec.columns, spec.rows)
    pitches = (ctypes.c_uint64 * 1)(spec.columns * _ITEM_BYTES[spec.element])
    box = (ctypes.c_uint32 * 2)(spec.box_columns, spec.box_rows)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    modes = (0, _SWIZZLES[spec.swizzle], _L2_256, 0)
    status = encode(place, _ELEMENTS[spec.element], 2, address, sizes, pitches, box, steps, *modes)
    return status, ctypes.string_at(place, MAP_BYTES)
