"""A recorded step with kernels in place of several calls, and its check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.fusion.checking import run_checked
from quantkit.fusion.patterns.codes_of_products import end_products_in_codes
from quantkit.fusion.program import Call, Program
from quantkit.fusion.rows.fuse import fuse_rows


@dataclass(frozen=True, eq=False)
class Fused:
    """A program with kernels, and the one that it was made of."""

    program: Program
    original: Program

    @property
    def kernels(self) -> tuple[Call, ...]:
        """The calls that the original lacks: of equal ones on equal shapes, the first."""
        original, layouts = {*self.original.calls}, self.original.layouts
        found: dict[object, Call] = {}
        for call in self.program.calls:
            if call not in original:
                shapes = tuple(layouts[value].shape for value in call.reads)
                found.setdefault((str(call.operator), shapes), call)
        return tuple(found.values())

    def check(self, inputs: Sequence[Tensor]) -> Any:
        """Return what the original returns on inputs, once the kernels agree with its calls.

        Raises:
            WrongKernelError: a kernel gives something else.
        """
        return run_checked(self.original, self.kernels, inputs)


def fuse(program: Program) -> Fused:
    """Put kernels in a program: patterns of our own products first, row kernels for the rest.

    Raises:
        KernelError: a row kernel cannot be compiled.
    """
    return Fused(fuse_rows(with_patterns(program)), program)


def with_patterns(program: Program) -> Program:
    """Return a program with one of our operators for each pattern of several calls."""
    return end_products_in_codes(program)
