"""Products fused with a residual sum, which is rounded once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops.checks import IO_DTYPES, check_device, expect, given
from quantkit.device.ops.op import Argument, Axis, Op, Operands, Options, Problem, Variant
from quantkit.errors import ShapeError

#: What their names and families end in.
SUFFIX = "_residual"
#: Of the variants with a gate.
_GATED = "gated"

_Check = Callable[[Op, Operands, Options], Problem]
_Sample = Callable[[Variant, tuple[int, int, int], torch.Generator], tuple[Operands, Options]]


def with_residual(plain: Op, *, gates: bool) -> tuple[Op, Op]:
    """Return a product and its twin ``residual + gate * product``, rounded once.

    Args:
        plain: the product; its last operand is the bias.
        gates: the twin takes a gate, a row for as many rows of the product, or None.
    """
    (y,) = (a for a in plain.args if a.written)
    gate = Argument("gate", "io", "[m / rows, n]", null="no gate")
    added = (Argument("residual", "io", y.shape), *((gate,) if gates else ()))
    place = plain.args.index(y)
    operands = ", ".join(f"Tensor{'?' if a.null else ''} {a.name}" for a in added)
    gated = "gate[i / rows, j] * " if gates else ""
    twin = replace(
        plain,
        name=plain.name + SUFFIX,
        family=plain.family + SUFFIX,
        formula=f"y = residual + {gated}{plain.name}'s y before it is rounded",
        schema=plain.schema.replace("Tensor? bias,", f"Tensor? bias, {operands},"),
        axes=_with_axis(plain.axes, ("", _GATED) if gates else ("",)),
        args=(
            *(*plain.args[:place], *added, *plain.args[place:]),
            *((Argument("rows", "i32"),) if gates else ()),
        ),
        check=_checking(plain.check, gates=gates),
        reference=_adding(plain, len(added)),
        budget=replace(
            plain.budget,
            float32=(2.5, 1.0),
            reason=f"{plain.budget.reason}; as much for a gate and for what is added",
        ),
        sample=_sampling(plain, gates=gates),
    )
    return plain, twin


def _with_axis(axes: tuple[Axis, ...], words: tuple[str, ...]) -> tuple[Axis, ...]:
    """Return the axes with one more, before the outputs' type."""
    place = next(i for i, axis in enumerate(axes) if axis.macro == "QK_IO")
    return (*axes[:place], Axis("QK_RESIDUAL", words, first=1), *axes[place:])


def _checking(plain: _Check, *, gates: bool) -> _Check:
    def check(op: Op, operands: Operands, options: Options) -> Problem:
        product, residual, gate = _apart(operands, gates=gates)
        problem = plain(op, product, options)
        ((shape, dtype),) = op.outputs(product, options)
        expect(op.name, "residual", residual, dtype, shape)
        check_device(op.name, "residual", residual, given(operands[0]))
        *words, io = problem.words
        problem = replace(problem, words=(*words, "" if gate is None else _GATED, io))
        if not gates:
            return problem
        assert isinstance(problem.sizes, dict)
        rows = shape[0] if gate is None else _rows_of(op.name, gate, residual)
        return replace(problem, sizes={**problem.sizes, "rows": max(rows, 1)})

    return check


def _rows_of(op: str, gate: Tensor, residual: Tensor) -> int:
    """Return how many rows share one of the gate; refuse a gate that does not fit.

    Raises:
        ShapeError, KernelError: it has another shape, dtype or device.
    """
    (m, n), pictures = residual.shape, max(gate.shape[0] if gate.ndim else 0, 1)
    expect(op, "gate", gate, residual.dtype, (pictures, n))
    check_device(op, "gate", gate, residual)
    if m % pictures:
        raise ShapeError(f"{op}: gate of {pictures} pictures, expected a divisor of {m} rows")
    return m // pictures


def _apart(operands: Operands, *, gates: bool) -> tuple[Operands, Tensor, Tensor | None]:
    """Return the product's operands, the residual, and the gate."""
    if not gates:
        return operands[:-1], given(operands[-1]), None
    return operands[:-2], given(operands[-2]), operands[-1]


def _adding(plain: Op, count: int) -> Callable[..., Tensor]:
    """Return the twin's reference, which has so many operands more."""
    inputs = plain.inputs

    def added(*arguments: Any, precision: torch.dtype = torch.float32) -> Tensor:
        product, others = arguments[:inputs], arguments[inputs:]
        (residual, *gate), (*options, dtype) = others[:count], others[count:]
        y: Tensor = plain.reference(*product, *options, precision, precision=precision)
        if gate and gate[0] is not None:
            y = y * gate[0].to(precision).repeat_interleave(len(y) // len(gate[0]), dim=0)
        summed: Tensor = (y + residual.to(precision)).to(dtype)
        return summed

    return added


def _sampling(plain: Op, *, gates: bool) -> _Sample:
    def sample(
        variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
    ) -> tuple[Operands, Options]:
        operands, options = plain.sample(variant, sizes, generator)
        ((shape, _),) = plain.outputs(operands, options)
        dtype = IO_DTYPES[variant.word("QK_IO")]
        residual = torch.randn(shape, generator=generator).to(dtype)
        if not gates:
            return (*operands, residual), options
        pictures = 2 if shape[0] % 2 == 0 else 1
        gate = torch.randn((pictures, shape[1]), generator=generator).to(dtype)
        gated = variant.word("QK_RESIDUAL") == _GATED
        return (*operands, residual, gate if gated else None), options

    return sample
