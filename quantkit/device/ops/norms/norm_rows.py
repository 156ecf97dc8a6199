"""Common parts of norms with quantization: numbers per column, one static scale."""

import torch
from torch import Tensor

from quantkit.device.ops.checks import check_device, check_scalar, expect
from quantkit.device.ops.norms.quantize import quantize_static
from quantkit.device.ops.op import Argument, Operands, Variant

INPUT_ARGS = (
    Argument("weight", "io", "[k]", null="ones"),
    Argument("bias", "io", "[k]", null="zeros"),
    Argument("smooth", "f32", "[k]", null="not smoothed (variants without _smooth)"),
    Argument("scale", "f32", "[1]"),
)


def check_input(op: str, x: Tensor, numbers: Operands, scale: Tensor) -> None:
    """Refuse numbers per column that do not fit x (..., K), or more than one scale.

    Args:
        op: its name.
        x: what the norm reads.
        numbers: weight and bias, of x's dtype; smooth, float32.
        scale: of the codes.
    """
    check_columns(op, x, numbers)
    check_scalar(op, "scale", scale, x)


def check_columns(op: str, x: Tensor, numbers: Operands) -> None:
    """Refuse numbers per column that do not fit x (..., K): weight, bias and smooth."""
    for argument, tensor in zip(INPUT_ARGS, numbers, strict=False):
        if tensor is not None:
            name, dtype = argument.name, x.dtype if argument.element == "io" else torch.float32
            expect(op, name, tensor, dtype, (x.shape[-1],))
            check_device(op, name, tensor, x)


def codes_of(y: Tensor, smooth: Tensor | None, scale: Tensor, fmt: str) -> Tensor:
    """Return the codes of ``y * smooth * (1 / scale)``, of any shape (..., K)."""
    rows = y.float().reshape(-1, y.shape[-1])
    rows = rows if smooth is None else rows * smooth
    factor = (1 / scale).clamp(max=torch.finfo(torch.float32).max)
    codes = quantize_static(rows * factor, None, torch.ones_like(scale), fmt)
    return codes.reshape(y.shape)


def sample_input(variant: Variant, columns: int, generator: torch.Generator) -> Operands:
    """Return smooth and scale of a variant."""
    smooth = torch.rand(columns, generator=generator) + 0.5 if variant.word("QK_SMOOTH") else None
    return smooth, torch.tensor([0.013])
