"""Calls of packed layers that were made before: kernels are launched, and nothing is asked.

What a call of a layer looks up (operations, operands, prepared calls) is the same for every input
of a shape, and takes the host longer than the launches. So a layer keeps, for each shape and dtype
of its input, the prepared calls and what they read beside the input. They are used for as long as
the layer has the very tensors, at the very addresses.
"""

from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantkit.device.backends import is_free, sums_are_fast
from quantkit.device.gpu.calls import Call

#: Tensors of a layer; None for those that it has not.
Read = tuple[Tensor | None, ...]
#: Shapes of inputs that a layer remembers.
_MOST = 32
_address = Tensor.data_ptr


class Product(NamedTuple):
    """Multiplying codes of one shape: all but the codes and their scale."""

    multiply: Call
    weights: Read

    def __call__(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the product."""
        return self.multiply(codes, scale, *self.weights)[0]

    def over(self, own: Callable[[Read], Read | None]) -> "Product | None":
        """Return the same over a layer's own tensors; None where it reads others."""
        weights = own(self.weights)
        return None if weights is None else Product(self.multiply, weights)


class TwoKernels(NamedTuple):
    """Quantizing an input of one shape, and multiplying it: all but the input."""

    quantize: Call
    #: what is quantized with the input: smoothing, shift, and a static scale
    given: Read
    static: bool
    multiply: Call
    weights: Read

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        made = self.quantize(x, *self.given)
        scale = self.given[-1] if self.static else made[0]
        return self.multiply(made[-1], scale, *self.weights)[0]

    def over(self, own: Callable[[Read], Read | None]) -> "TwoKernels | None":
        """Return the same over a layer's own tensors; None where it reads others."""
        given, weights = own(self.given), own(self.weights)
        if given is None or weights is None:
            return None
        return self._replace(given=given, weights=weights)


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
            known[key] = None if call is None else call.over(tensors.own)


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

    def own(self, views: Read) -> Read | None:
        """Return these in place of their views, which would keep memory that a layer gave up.

        None where one is no view of these, but was computed.
        """
        own = {t.data_ptr(): t for t in self._there if t.is_contiguous()}
        found = tuple(None if t is None else own.get(t.data_ptr(), _OTHER) for t in views)
        return None if any(t is _OTHER for t in found) else found


#: In place of a tensor that a layer has not.
_OTHER = torch.empty(0)


def _of(layer: nn.Module) -> Read:
    return (*layer._parameters.values(), *layer._buffers.values())  # noqa: SLF001  twice as fast


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda
