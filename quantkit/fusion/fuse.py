"""A recorded step with kernels in place of several calls, and its check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.fusion.checking import run_checked
from quantkit.fusion.patterns.codes_of_products import end_products_in_codes
from quantkit.fusion.program import Program
from quantkit.fusion.rows.fuse import fuse_rows


@dataclass(frozen=True, eq=False)
class Fused:
    """A program with kernels, and the one that it was made of."""

    program: Program
    original: Program

    def check(self, inputs: Sequence[Tensor]) -> Any:
        """Return what the original returns on inputs, once the kernels agree with its calls.

        Raises:
            WrongKernelError: a kernel gives something else.
        """
        return run_checked(self.original, self.program, inputs)


def fuse(program: Program) -> Fused:
    """Put kernels in a program: patterns of our own products first, row kernels for the rest.

    Raises:
        KernelError: a row kernel cannot be compiled.
    """
    return Fused(fuse_rows(with_patterns(program)), program)


def with_patterns(program: Program) -> Program:
    """Return a program with one of our operators for each pattern of several calls."""
    return end_products_in_codes(program)
