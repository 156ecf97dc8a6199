"""Checking row kernels against the calls that they replace, on the step's own numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantkit.fusion.program import Call, Program, Value, values_in
from quantkit.numerics.formats import find_format

#: Share of the largest number by which rounding once differs from rounding at each operator.
_NEAR = 0.02
#: Root of the mean square of differences: of codes that are integers, and of others as a share.
_INTEGERS, _FLOATS = 0.5, 0.05


class WrongKernelError(Exception):
    """A generated kernel that does not compute what its calls do."""


def run_checked(program: Program, kernels: Mapping[int, Call], inputs: Sequence[Tensor]) -> Any:
    """Run a program, and each kernel on what its calls have read.

    Args:
        program: without the kernels.
        kernels: calls of kernels, by the place of the last call that each replaces.
        inputs: of the step.

    Returns:
        what the program returns.

    Raises:
        WrongKernelError: a kernel gives something else.
    """
    tensors = {**program.constants, **dict(zip(program.inputs, inputs, strict=True))}
    freed = _last_reads(program, kernels)
    for place, call in enumerate(program.calls):
        tensors |= call.make(tensors)
        if (kernel := kernels.get(place)) is not None:
            _check(kernel, tensors)
        for value in freed.get(place, ()):
            del tensors[value]
    return pytree.tree_map_only(Value, tensors.__getitem__, program.output)


def _last_reads(program: Program, kernels: Mapping[int, Call]) -> dict[int, list[Value]]:
    """Return the values that nothing reads any more, by place."""
    last: dict[Value, int] = {}
    for place, call in enumerate(program.calls):
        last |= dict.fromkeys((*call.reads, *filter(None, call.results)), place)
        if (kernel := kernels.get(place)) is not None:
            last |= dict.fromkeys((*kernel.reads, *filter(None, kernel.results)), place)
    kept = {*program.constants, *program.inputs, *values_in(program.output)}
    found: dict[int, list[Value]] = {}
    for value, place in last.items():
        if value not in kept:
            found.setdefault(place, []).append(value)
    return found


def _check(kernel: Call, tensors: Mapping[Value, Tensor]) -> None:
    formats = kernel.operator.formats
    for (value, found), name in zip(kernel.make(tensors).items(), formats, strict=True):
        if not _agree(found, tensors[value], name):
            raise WrongKernelError(f"{kernel.operator}: %{value.number} is another than its calls'")


def _agree(found: Tensor, expected: Tensor, format_name: str) -> bool:
    """Tell whether numbers are the same but for rounding.

    Args:
        found: of a kernel.
        expected: of operators, of the same shape and dtype.
        format_name: of codes; empty for others.
    """
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if format_name:
        return _codes_agree(found, expected, format_name)
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
