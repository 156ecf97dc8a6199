"""Attention fused with quantization for the output projection, its only reader."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops.attention import coded_attention
from quantkit.device.ops.axes import format_axis
from quantkit.device.ops.checks import check_scalar, check_smoothing, given
from quantkit.device.ops.norms.quantize import quantize_static
from quantkit.device.ops.op import Argument, Budget, Op, Operands, Options, Output, Problem, Variant
from quantkit.numerics.formats import E4M3FN

#: What their names and families end in.
SUFFIX = "_codes"
#: Of the codes that are written.
Y_FORMAT = E4M3FN.name
#: Operands that attention has not: smoothing of columns, and the scale.
_ADDED = 2

_Sample = Callable[[Variant, tuple[int, int, int], torch.Generator], tuple[Operands, Options]]


def _with_codes(plain: Op) -> Op:
    """Return the twin of attention that gives e4m3fn codes of its result."""
    (place,) = (i for i, argument in enumerate(plain.args) if argument.written)
    added = (
        Argument("smooth", "f32", "[heads * d]", null="not smoothed"),
        Argument("y_scale", "f32", "[1]"),
        replace(plain.args[place], element="u8"),
    )
    return replace(
        plain,
        name=plain.name + SUFFIX,
        family=plain.family + SUFFIX,
        formula=(
            f"y = {Y_FORMAT}(clamp(io(z) * smooth[j] / y_scale[0], -max, max)), "
            f"z {plain.name}'s y before it is rounded, j its column among those of all heads"
        ),
        schema=plain.schema.replace(
            "Tensor? v_mean,", "Tensor? v_mean, Tensor? smooth, Tensor y_scale,"
        ),
        axes=(*plain.axes, format_axis("Y", (Y_FORMAT,))),
        args=(*plain.args[:place], *added, *plain.args[place + 1 :]),
        check=_checking(plain),
        outputs=_outputs,
        reference=_quantizing(plain),
        budget=Budget(
            plain.budget.nmse,
            plain.budget.ulp,
            plain.budget.float32,
            f"{plain.budget.reason}, and with it codes of numbers between two of them",
        ),
        sample=_sampling(plain.sample),
    )


def _checking(plain: Op) -> Callable[[Op, Operands, Options], Problem]:
    def check(op: Op, operands: Operands, options: Options) -> Problem:
        problem = plain.check(op, operands[:-_ADDED], options)
        (smooth, scale), q = operands[-_ADDED:], given(operands[0])
        _, heads, head_size, *_ = options
        check_smoothing(op.name, smooth, heads * head_size, q)
        check_scalar(op.name, "y_scale", given(scale), q)
        return replace(problem, words=(*problem.words, Y_FORMAT))

    return check


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    _, heads, head_size, *_ = options
    n, m, _ = given(operands[0]).shape
    return (((n // heads, m, heads, head_size), torch.uint8),)


def _quantizing(plain: Op) -> Callable[..., Tensor]:
    """Return the twin's reference: attention, and then codes of it."""
    inputs = plain.inputs

    def quantized(*arguments: Any, precision: torch.dtype = torch.float32) -> Tensor:
        operands, options = arguments[:inputs], arguments[inputs + _ADDED :]
        smooth, scale = arguments[inputs : inputs + _ADDED]
        y: Tensor = plain.reference(*operands, *options, precision=precision)
        rows = y.flatten(2).flatten(0, 1)
        return quantize_static(rows, smooth, scale, Y_FORMAT).view(y.shape)

    return quantized


def _sampling(plain: _Sample) -> _Sample:
    def sample(
        variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
    ) -> tuple[Operands, Options]:
        operands, options = plain(variant, sizes, generator)
        _, heads, head_size, *_ = options
        smooth = torch.rand(heads * head_size, generator=generator) + 0.5
        return (*operands, smooth, torch.tensor([0.013])), options

    return sample


OPS = tuple(_with_codes(op) for op in coded_attention.OPS if op.family == "attention")
