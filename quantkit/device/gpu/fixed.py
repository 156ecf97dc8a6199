"""Repeated calls with operands at the same addresses, except input and output.

A layer's product and, before it, the quantizing of its input: addresses of weights and scales stand
in the arguments already. Codes in between are nobody's tensor: their memory is taken from torch's
allocator and given back behind the launches, in the order of the stream, so that what is queued
later may have it, and a captured graph keeps it.
"""

from collections import Counter, deque
from functools import partial
from math import prod

from torch import Tensor

from quantkit.device import log
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.gpu.launcher import Block, plain

#: Of tensors in launch order, without those that are None.
Addresses = tuple[int, ...]

#: Kernels move 16 bytes at a time.
_ALIGNED = 16


class Product:
    """Multiplying codes of one shape: all but the codes and their scale."""

    __slots__ = ("_device", "_free", "_new", "_new_block", "_output", "_queue", "reads", "said")

    def __init__(self, multiply: Call, weights: Addresses) -> None:
        """Prepare a product.

        Args:
            multiply: of codes, their scale, and weights.
            weights: where they lie.
        """
        self._device, self.said, self.reads = multiply.device, multiply.said, weights
        self._new, (self._output,) = multiply.device.memory.new, multiply.outputs
        self._queue = multiply.launch.queue
        self._new_block = partial(multiply.launch.block, (0, 0, *weights, 0))
        # Blocks that no thread is using. Both ends of a deque are safe without a lock.
        self._free: deque[Block] = deque()

    def __call__(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the product."""
        device = self._device
        if device.current() != device.index:
            with device.guard(device.index):
                return self(codes, scale)
        codes, scale = plain(codes), plain(scale)
        log.note(*self.said)
        return self.at(codes.data_ptr(), scale.data_ptr(), device.stream(device.index))

    def at(self, codes: int, scale: int, stream: int) -> Tensor:
        """Return the product of codes and a scale that lie there, on the current device."""
        try:
            block = self._free.pop()
        except IndexError:
            block = self._new_block()
        y = self._new(*self._output)
        places = block.places
        places[0], places[1], places[-1] = codes, scale, y.data_ptr()
        self._queue(block, stream)
        self._free.append(block)
        return y


class TwoKernels:
    """Quantizing an input of one shape, and multiplying it: all but the input."""

    __slots__ = (
        "_behind",
        "_device",
        "_free",
        "_give_back",
        "_multiply",
        "_new_block",
        "_queue",
        "_said",
        "_scale",
        "_size",
        "_take",
        "reads",
    )

    def __init__(
        self, quantize: Call, given: Addresses, multiply: Call, weights: Addresses
    ) -> None:
        """Prepare both.

        Args:
            quantize: of an input -> codes; or a scale for each row, and codes.
            given: where lies what is quantized with it: smoothing, and a static scale.
            multiply: of codes, their scale, and weights.
            weights: where they lie.
        """
        self._device, memory = quantize.device, quantize.device.memory
        self._take, self._give_back = memory.take, memory.give_back
        self._said = Counter((quantize.said, multiply.said))
        self._multiply = Product(multiply, weights).at
        self.reads = (*given, *weights)
        self._queue = quantize.launch.queue
        made = (0,) * len(quantize.outputs)
        self._new_block = partial(quantize.launch.block, (0, *given, *made))
        self._free: deque[Block] = deque()
        *scales, (shape, _, _) = quantize.outputs
        #: where the scales of rows stand behind the codes; 0, and the address of the static one
        self._behind = -(-prod(shape) // _ALIGNED) * _ALIGNED if scales else 0
        self._scale = 0 if scales else given[-1]
        self._size = self._behind + 4 * shape[0] if scales else prod(shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        device = self._device
        if device.current() != device.index:
            with device.guard(device.index):
                return self(x)
        place = x.data_ptr()
        if place % _ALIGNED or not x.is_contiguous():
            x = plain(x)
            place = x.data_ptr()
        try:
            block = self._free.pop()
        except IndexError:
            block = self._new_block()
        stream, scale = device.stream(device.index), self._scale
        codes = self._take(self._size, stream)
        try:
            places = block.places
            places[0], places[-1] = place, codes
            if self._behind:
                places[-2] = scale = codes + self._behind
            self._queue(block, stream)
            self._free.append(block)
            log.note_again(self._said)
            return self._multiply(codes, scale, stream)
        finally:
            self._give_back(codes)
