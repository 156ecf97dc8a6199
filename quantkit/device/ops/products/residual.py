"""Products fused with a residual sum, which is rounded once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops.checks import check_device, expect, given
from quantkit.device.ops.op import Argument, Axis, Op, Operands, Options, Problem, Variant

#: What their names and families end in.
SUFFIX = "_residual"

_Check = Callable[[Op, Operands, Options], Problem]
_Sample = Callable[[Variant, tuple[int, int, int], torch.Generator], tuple[Operands, Options]]


def with_residual(plain: Op) -> tuple[Op, Op]:
    """Return a product and its twin ``residual + product``, rounded once.

    Args:
        plain: the product; its last operand is the bias.
    """
    (y,) = (a for a in plain.args if a.written)
    place = plain.args.index(y)
    twin = replace(
        plain,
        name=plain.name + SUFFIX,
        family=plain.family + SUFFIX,
        formula=f"y = residual + {plain.name}'s y before it is rounded",
        schema=plain.schema.replace("Tensor? bias,", "Tensor? bias, Tensor residual,"),
        axes=_with_axis(plain.axes),
        args=(*plain.args[:place], Argument("residual", "io", y.shape), *plain.args[place:]),
        check=_checking(plain.check),
        reference=_adding(plain),
        budget=replace(
            plain.budget,
            float32=(2.0, 1.0),
            reason=f"{plain.budget.reason}; as much for what is added",
        ),
        sample=_sampling(plain),
    )
    return plain, twin


def _with_axis(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the axes with one of a single word more, before the outputs' type."""
    place = next(i for i, axis in enumerate(axes) if axis.macro == "QK_IO")
    return (*axes[:place], Axis("QK_RESIDUAL", ("",), first=1), *axes[place:])


def _checking(plain: _Check) -> _Check:
    def check(op: Op, operands: Operands, options: Options) -> Problem:
        product, residual = operands[:-1], given(operands[-1])
        problem = plain(op, product, options)
        ((shape, dtype),) = op.outputs(product, options)
        expect(op.name, "residual", residual, dtype, shape)
        check_device(op.name, "residual", residual, given(operands[0]))
        *words, io = problem.words
        return replace(problem, words=(*words, "", io))

    return check


def _adding(plain: Op) -> Callable[..., Tensor]:
    """Return the twin's reference, which has an operand more."""
    inputs = plain.inputs

    def added(*arguments: Any, precision: torch.dtype = torch.float32) -> Tensor:
        product, (residual, *options, dtype) = arguments[:inputs], arguments[inputs:]
        y: Tensor = plain.reference(*product, *options, precision, precision=precision)
        summed: Tensor = (y + residual.to(precision)).to(dtype)
        return summed

    return added


def _sampling(plain: Op) -> _Sample:
    def sample(
        variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
    ) -> tuple[Operands, Options]:
        operands, options = plain.sample(variant, sizes, generator)
        ((shape, dtype),) = plain.outputs(operands, options)
        residual = torch.randn(shape, generator=generator).to(dtype)
        return (*operands, residual), options

    return sample
