"""Operands of products that end in codes of heads."""

from dataclasses import dataclass, replace

import torch

from quantkit.device.ops.op import Variant
from tests.support.kernel_cases import launch


@dataclass(frozen=True)
class ProjectionCase:
    """Operands of one product."""

    variant: Variant
    #: argument name -> operand, or what its result is like
    tensors: dict[str, torch.Tensor | None]
    numbers: dict[str, int]

    def changed(self, **tensors):
        return replace(self, tensors={**self.tensors, **tensors})

    def run(self, layout):
        return launch(self.variant, layout, self.tensors, self.numbers)["codes"]


def projection_case(variant, sizes, generator, *, bias=True):
    """Return random operands; the operation chooses heads and their columns by ``sizes``."""
    op = variant.op
    (*operands, last), options = op.sample(variant, sizes, generator)
    operands = (*operands, last if bias else None)
    names = [a.name for a in op.args if a.is_pointer]
    ((shape, dtype),) = op.outputs(operands, options)
    tensors = dict(zip(names, (*operands, torch.empty(shape, dtype=dtype)), strict=True))
    return ProjectionCase(variant, tensors, op.integers(op.check(op, operands, options).sizes))
