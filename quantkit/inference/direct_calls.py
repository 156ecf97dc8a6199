"""Calls of packed layers that were made before: kernels are launched, and nothing is asked.

What a call of a layer looks up (operations, operands, prepared calls) is the same for every input
of a shape, and takes the host longer than the launches. So a layer keeps, for each shape and dtype
of its input, the prepared calls and where lies what they read beside the input. They are used for
as long as the layer has the very tensors, at the very addresses.
"""

from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from quantkit.device.backends import is_free, sums_are_fast
from quantkit.device.gpu.calls import Call
from quantkit.device.gpu.launcher import plain

#: Tensors of a layer; None for those that it has not.
Read = tuple[Tensor | None, ...]
#: Of tensors in launch order, without those that are None.
Addresses = tuple[int, ...]
#: Shapes of inputs that a layer remembers.
_MOST = 32
_address = Tensor.data_ptr


class Product(NamedTuple):
    """Multiplying codes of one shape: all but the codes and their scale."""

    multiply: Call
    weights: Addresses

    def __call__(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the product."""
        codes, scale = plain(codes), plain(scale)
        return self.multiply.at((codes.data_ptr(), scale.data_ptr(), *self.weights))[0]


class TwoKernels(NamedTuple):
    """Quantizing an input of one shape, and multiplying it: all but the input."""

    quantize: Call
    #: of what is quantized with the input: smoothing, shift, and a static scale
    given: Addresses
    static: bool
    multiply: Call
    weights: Addresses

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        x = plain(x)
        made = self.quantize.at((x.data_ptr(), *self.given))
        scale = self.given[-1] if self.static else made[0].data_ptr()
        return self.multiply.at((made[-1].data_ptr(), scale, *self.weights))[0]


class DirectCalls:
    """The calls of one layer; a copy of the layer starts with none."""

    def __init__(self) -> None:
        #: key -> Product or TwoKernels, or None where more is done; and what they read. In one
        #: tuple: another thread may read
        self._known: tuple[dict[Hashable, Any], _Tensors] = ({}, _Tensors(()))

    def __deepcopy__(self, memo: object) -> "DirectCalls":
        return DirectCalls()

    def __reduce__(self) -> tuple[type["DirectCalls"], tuple[()]]:
        return DirectCalls, ()

    def find(self, layer: nn.Module, key: Hashable) -> Any:
        """Return what was learned of a ``key_of``; None where the layer has to ask."""
        known, tensors = self._known
        call = known.get(key)
        return call if call is not None and is_free() and tensors.are_of(layer) else None

    def learn(
        self, layer: nn.Module, key: Hashable, make: Callable[[], Product | TwoKernels | None]
    ) -> None:
        """Remember how an answer was computed, by what ``make`` finds prepared."""
        known, tensors = self._known
        if not is_free():
            return
        if len(known) >= _MOST or not tensors.are_of(layer):
            self._known = known, tensors = {}, _Tensors(_of(layer))
        if key not in known:
            call = make()
            known[key] = call if call is not None and tensors.have(call) else None


def key_of(x: Tensor, *others: Hashable) -> Hashable:
    """Return what a direct call depends on, beside the layer's tensors; None where there is none.

    Args:
        x: the input.
        others: what else there is of a call.
    """
    return (x.shape, x.dtype, x.get_device(), sums_are_fast(), *others) if _has_kernels(x) else None


class _Tensors:
    """The tensors of a layer, and where they lay."""

    __slots__ = ("_addresses", "_all", "_there")

    def __init__(self, tensors: Read) -> None:
        self._all = tensors
        self._there = tuple(t for t in tensors if t is not None)
        self._addresses = tuple(map(_address, self._there))

    def are_of(self, layer: nn.Module) -> bool:
        """Tell whether a layer's tensors are these, and where they lay."""
        now = _of(layer)
        same = len(now) == len(self._all) and all(map(is_, now, self._all))
        return same and tuple(map(_address, self._there)) == self._addresses

    def have(self, call: Product | TwoKernels) -> bool:
        """Tell whether a call reads these alone, and nothing that was computed."""
        there = {t.data_ptr() for t in self._there if plain(t) is t}
        read = call.weights if isinstance(call, Product) else (*call.given, *call.weights)
        return there.issuperset(read)


def addresses_of(tensors: Read) -> Addresses:
    """Return where tensors lie, without those that are None."""
    return tuple(t.data_ptr() for t in tensors if t is not None)


def _of(layer: nn.Module) -> Read:
    return (*layer._parameters.values(), *layer._buffers.values())  # noqa: SLF001  twice as fast


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda
