"""Whether a tensor is still the one that something was made of, and what was made of tensors."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Version(NamedTuple):
    """A tensor as it was: gone, or written since, it is another one."""

    tensor: "weakref.ref[Tensor]"
    version: int
    address: int

    def is_now(self, x: Tensor) -> bool:
        """Tell whether ``x`` is that tensor, or a view of it, and nothing was written since."""
        base = x if x._base is None else x._base  # noqa: SLF001  a view may be made anew
        same = self.tensor() is base and self.version == x._version  # noqa: SLF001  the only counter
        return same and self.address == x.data_ptr()

    def holds(self) -> bool:
        """Tell whether the tensor is there, and nothing was written since."""
        x = self.tensor()
        return x is not None and self.is_now(x)


def version_of(x: Tensor, gone: Callable[[Any], None] | None = None) -> Version:
    """Return a tensor as it is.

    Args:
        x: counts its versions: no tensor of inference mode.
        gone: called with the reference when the tensor, or what it is a view of, is freed.
    """
    base = x if x._base is None else x._base  # noqa: SLF001  as above
    return Version(weakref.ref(base, gone), x._version, x.data_ptr())  # noqa: SLF001  as above


def same_versions(versions: Sequence[Version], tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors are, in turn, those that they were."""
    return len(versions) == len(tensors) and all(
        was.is_now(now) for was, now in zip(versions, tensors, strict=True)
    )


class Derived:
    """What was made of some tensors, until one of them changes; a copy starts anew."""

    def __init__(self) -> None:
        self._made: tuple[tuple[Version, ...], list[Tensor | None]] | None = None

    def of(
        self, tensors: Sequence[Tensor | None], make: Callable[[Tensor], Tensor]
    ) -> list[Tensor | None]:
        """Return what ``make`` gives of each tensor, None of none; it is called once for each."""
        there = [t for t in tensors if t is not None]
        if self._made is None or not same_versions(self._made[0], there):
            made = [None if t is None else make(t) for t in tensors]
            self._made = tuple(map(version_of, there)), made
        return self._made[1]

    def holds(self) -> bool:
        """Tell whether what was made is still what would be made: a recorded step reads it."""
        return self._made is None or all(was.holds() for was in self._made[0])

    def __deepcopy__(self, memo: object) -> "Derived":
        return Derived()

    def __reduce__(self) -> tuple[type["Derived"], tuple[()]]:
        return Derived, ()
