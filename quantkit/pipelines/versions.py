"""Versions of tensors: identity and torch's write counter, to detect stale results."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Version(NamedTuple):
    """A tensor's identity and version; a freed or overwritten tensor no longer matches."""

    tensor: "weakref.ref[Tensor]"
    version: int
    address: int

    def is_now(self, x: Tensor) -> bool:
        """Tell whether ``x`` is that tensor, or a view of it, and nothing was written since."""
        base = x if x._base is None else x._base  # noqa: SLF001  a view may be another object
        same = self.tensor() is base and self.version == x._version  # noqa: SLF001  the only counter
        return same and self.address == x.data_ptr()


def version_of(x: Tensor, gone: Callable[[Any], None] | None = None) -> Version:
    """Return the current version of a tensor.

    Args:
        x: counts its versions: no tensor of inference mode.
        gone: called with the reference when the tensor, or what it is a view of, is freed.
    """
    base = x if x._base is None else x._base  # noqa: SLF001  as above
    return Version(weakref.ref(base, gone), x._version, x.data_ptr())  # noqa: SLF001  as above


def same_versions(versions: Sequence[Version], tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors match versions, pairwise."""
    return len(versions) == len(tensors) and all(
        was.is_now(now) for was, now in zip(versions, tensors, strict=True)
    )
