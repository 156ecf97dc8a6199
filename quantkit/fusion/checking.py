"""Checking kernels against the calls that they replace, on the step's own numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantkit.device.torch_operators import OVERLOADS
from quantkit.fusion.patterns.picture_operators import PictureNorm
from quantkit.fusion.program import Call, Program, Value
from quantkit.fusion.rows.row_kernel import RowKernel
from quantkit.numerics.formats import find_format

#: Operators of ours that end in codes.
_PRODUCTS = frozenset(OVERLOADS.values())
#: Share of the largest number by which rounding once differs from rounding at each operator, and
#: sums in another order, of float16 or by atomic operations.
_NEAR = 0.02
#: Root of the mean square of differences: of codes that are integers, and of others as a share.
_INTEGERS, _FLOATS = 0.5, 0.05


class WrongKernelError(Exception):
    """A kernel that does not compute what the calls do that it replaces."""


def run_checked(program: Program, fused: Program, inputs: Sequence[Tensor]) -> Any:
    """Run a program, and each kernel of a fused one on what its calls have read.

    Args:
        program: without the kernels.
        fused: with them; their results are values of the program.
        inputs: of the step.

    Returns:
        what the program returns.

    Raises:
        WrongKernelError: a kernel gives something else.
    """
    tensors = {**program.constants, **dict(zip(program.inputs, inputs, strict=True))}
    checks = _by_place(program, _kernels(program, fused))
    here = [(call, *checks.get(place, ())) for place, call in enumerate(program.calls)]
    freed = program.last_uses(here)
    for place, call in enumerate(program.calls):
        tensors |= call.make(tensors)
        for kernel in checks.get(place, ()):
            _check(kernel, tensors)
        for value in freed.get(place, ()):
            del tensors[value]
    return pytree.tree_map_only(Value, tensors.__getitem__, program.output)


def _kernels(program: Program, fused: Program) -> tuple[Call, ...]:
    """Return the calls that a program lacks: of equal ones on equal shapes, the first."""
    mine, found = {*program.calls}, dict[object, Call]()
    for call in fused.calls:
        if call not in mine:
            shapes = tuple(program.layouts[value].shape for value in call.reads)
            found.setdefault((str(call.operator), shapes), call)
    return tuple(found.values())


def _by_place(program: Program, kernels: Sequence[Call]) -> dict[int, list[Call]]:
    """Return kernels by the last call that gives one of their results."""
    place_of = {
        result: place
        for place, call in enumerate(program.calls)
        if not call.writes
        for result in call.results
        if result is not None
    }
    found: dict[int, list[Call]] = {}
    for kernel in kernels:
        last = max(place_of[result] for result in kernel.results if result is not None)
        found.setdefault(last, []).append(kernel)
    return found


def _check(kernel: Call, tensors: Mapping[Value, Tensor]) -> None:
    formats = _formats_of(kernel)
    for (value, found), name in zip(kernel.make(tensors).items(), formats, strict=True):
        expected = tensors[value]
        if not (_codes_agree(found, expected, name) if name else is_near(found, expected)):
            raise WrongKernelError(f"{kernel.operator}: %{value.number} is another than its calls'")


def _formats_of(kernel: Call) -> tuple[str, ...]:
    """Return the formats of a kernel's results; empty where these are no codes."""
    if isinstance(kernel.operator, RowKernel):
        return kernel.operator.formats
    if isinstance(kernel.operator, PictureNorm):
        return (kernel.operator.format_name,)
    if kernel.operator not in _PRODUCTS:
        return ("",) * len(kernel.results)
    # The dtype of a product stands behind the format of what it writes.
    *_, fmt, _ = kernel.arguments
    return (fmt,)


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Tell whether numbers are the same but for rounding and the order of sums.

    Args:
        found: of a kernel, or of a recorded step.
        expected: of operators, of the same shape and dtype; integers have to be equal.
    """
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if not found.is_floating_point() or not found.numel():
        return torch.equal(found, expected)
    a, b = found.float(), expected.float()
    limit = _NEAR * float(b.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    return torch.allclose(a, b, rtol=0, atol=limit, equal_nan=True)


def _codes_agree(found: Tensor, expected: Tensor, format_name: str) -> bool:
    fmt = find_format(format_name)
    a, b = (codes.view(fmt.torch_dtype).float() for codes in (found, expected))
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(), b.nan_to_num()
    rms = float((a - b).square().mean().sqrt())
    return rms <= (_INTEGERS if fmt.is_integer else _FLOATS * float(b.square().mean().sqrt()))
