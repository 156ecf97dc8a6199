"""Tensor maps of Hopper's copy engine as plain numbers; gpu.tensor_maps encodes them."""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

#: Bytes of an element.
ITEM_BYTES = {"u8": 1, "f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled for a tensor, the last dimension first.

    Interleave none, L2 promotion 256 bytes, zeros outside.
    """

    #: the operand that the map describes: x, w or y
    operand: str
    #: u8, f16, bf16 or f32
    element: str
    sizes: tuple[int, ...]
    #: elements that one copy brings, along each dimension
    box: tuple[int, ...]
    #: bytes: CU_TENSOR_MAP_SWIZZLE_32B, _64B or _128B
    swizzle: int = 128
    #: take every how many-th element along each dimension; empty for all
    steps: tuple[int, ...] = ()
    #: bytes from one element to the next along all dimensions but the first; empty: contiguous
    strides: tuple[int, ...] = ()

    @property
    def pitches(self) -> tuple[int, ...]:
        """Bytes from one element to the next along all dimensions but the first.

        A tensor map needs multiples of 16.
        """
        if self.strides:
            return self.strides
        item = ITEM_BYTES[self.element]
        return tuple(item * count for count in accumulate(self.sizes[:-1], mul))
