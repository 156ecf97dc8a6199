"""A cache of prepared launches of packed layers, which skips all look-ups.

The look-ups of a layer's call (operations, operands, prepared calls) give the same for every input
of a shape, and take the host longer than the launches. So a layer keeps, for each shape and dtype
of its input, the prepared calls and the addresses of its own tensors. They are used for as long as
the layer has the same tensors at the same addresses.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from torch import Tensor, nn

from quantkit.device.backends import is_free, sums_are_fast
from quantkit.device.gpu.fixed import Addresses, Product, TwoKernels
from quantkit.device.gpu.launcher import plain
from quantkit.device.torch_operators import is_plain_call

Direct: TypeAlias = Product | TwoKernels
#: Tensors of a layer; None for those that it has not.
Read = tuple[Tensor | None, ...]
#: Shapes of inputs that a layer remembers.
_MOST = 32


class LaunchCache:
    """The prepared launches of one layer; a copy of the layer starts with none."""

    def __init__(self) -> None:
        #: key -> call, or None where more is done; and what they read. In one
        #: tuple: another thread may read
        self._known: tuple[dict[Hashable, Any], _Tensors] = ({}, _Tensors(()))

    def __deepcopy__(self, memo: object) -> "LaunchCache":
        return LaunchCache()

    def __reduce__(self) -> tuple[type["LaunchCache"], tuple[()]]:
        return LaunchCache, ()

    def find(self, layer: nn.Module, key: Hashable) -> Any:
        """Return the cached call of a key; None where the layer has to look up."""
        known, tensors = self._known
        call = known.get(key)
        return call if call is not None and tensors.are_of(layer) else None

    def learn(
        self, layer: nn.Module, x: Tensor, key: Hashable, make: Callable[[], Direct | None]
    ) -> None:
        """Cache the prepared call that ``make`` returns for inputs like ``x``."""
        if not _has_kernels(x):
            return
        known, tensors = self._known
        if len(known) >= _MOST or not tensors.are_of(layer):
            self._known = known, tensors = {}, _Tensors(_of(layer))
        if key not in known:
            call = make()
            known[key] = call if call is not None and tensors.have(call) else None


def key_of(x: object, *others: Hashable) -> Hashable:
    """Return the key of a direct call, besides the layer's tensors; None where there is none.

    Args:
        x: the input.
        others: what else there is of a call.
    """
    if is_plain_call(x) and is_free():
        return (x.shape, x.dtype, x.get_device(), sums_are_fast(), *others)
    return None


class _Tensors:
    """The tensors of a layer, and their addresses."""

    __slots__ = ("_all", "_there")

    def __init__(self, tensors: Read) -> None:
        self._all = tensors
        #: methods that return each tensor's address, and their last values
        self._there = tuple((t.data_ptr, t.data_ptr()) for t in tensors if t is not None)

    def are_of(self, layer: nn.Module) -> bool:
        """Tell whether a layer's tensors are these, at the same addresses."""
        if not self._are_parts_of(layer):
            return False
        for place, address in self._there:  # noqa: SIM110  faster than a generator
            if place() != address:
                return False
        return True

    def _are_parts_of(self, layer: nn.Module) -> bool:
        # One by one: loops, of C functions too, take twice as long.
        try:
            bias, codes, meta, factors, scale = layer._parameters.values()  # noqa: SLF001  as below
            static, smooth = layer._buffers.values()  # noqa: SLF001
            a, b, c, d, e, f, g = self._all
        except ValueError:
            # Somebody gave the layer more than FORMAT.md knows.
            return False
        return (
            (bias is a and codes is b and meta is c and factors is d and scale is e)
            and (static is f and smooth is g)
        )  # fmt: skip

    def have(self, call: Direct) -> bool:
        """Tell whether a call reads only these tensors, and no computed ones."""
        there = {t.data_ptr() for t in self._all if t is not None and plain(t) is t}
        return there.issuperset(call.reads)


def addresses_of(tensors: Read) -> Addresses:
    """Return the addresses of tensors, without those that are None."""
    return tuple(t.data_ptr() for t in tensors if t is not None)


def _of(layer: nn.Module) -> Read:
    return (*layer._parameters.values(), *layer._buffers.values())  # noqa: SLF001  twice as fast


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda
