"""Addresses of a tensor's elements, as a function of the place in another tensor's memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from quantkit.fusion.program import Layout


@dataclass(frozen=True)
class Dim:
    """Places that follow one another, and the distance of their elements."""

    size: int
    #: in elements; 0: all places have one element
    stride: int


#: From the outermost dimension to the innermost, those that continue one another merged.
Access = tuple[Dim, ...]


def access_of(argument: Layout, result: Layout) -> Access | None:
    """Return where an elementwise operator finds the argument's element of each place.

    Args:
        argument: broadcasts to the result's shape.
        result: dense; a place is an element's address in it.

    Returns:
        None where the result is empty or has gaps, or the argument does not broadcast.
    """
    strides = broadcast(argument, result.shape)
    if strides is None or 0 in result.shape:
        return None
    dims = [
        (apart, Dim(size, stride))
        for size, apart, stride in zip(result.shape, result.strides, strides, strict=True)
        if size != 1
    ]
    dims.sort(key=lambda dim: -dim[0])
    expected = prod(result.shape)
    for apart, dim in dims:
        expected //= dim.size
        if apart != expected:
            return None
    return merged([dim for _, dim in dims])


def merged(dims: Sequence[Dim]) -> Access:
    """Return dimensions with those that continue one another as one."""
    found: list[Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        if found and found[-1].stride == dim.stride * dim.size:
            found[-1] = Dim(found[-1].size * dim.size, dim.stride)
        else:
            found.append(dim)
    return tuple(found)


def is_identity(access: Access) -> bool:
    """Tell whether each place has the element of the same number."""
    return all(dim.stride == 1 for dim in access) and len(access) <= 1


def is_of_rows(access: Access, columns: int) -> bool:
    """Tell whether all places of a row of so many columns have the element of the row's number."""
    size = prod(dim.size for dim in access)
    return access == merged([Dim(size // columns, 1), Dim(columns, 0)])


def is_every_second(access: Access) -> bool:
    """Tell whether each place has the element of twice its number."""
    return len(access) == 1 and access[0].stride == 2


def broadcast(argument: Layout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a stride for each dimension of a shape; None where the argument does not fit it."""
    missing = len(shape) - len(argument.shape)
    if missing < 0:
        return None
    sizes = (1,) * missing + argument.shape
    strides = (0,) * missing + argument.strides
    if any(mine not in {1, size} for mine, size in zip(sizes, shape, strict=True)):
        return None
    return tuple(0 if mine == 1 else stride for mine, stride in zip(sizes, strides, strict=True))
