"""Quantizing: codes of 16-bit values, with one given scale or a scale for each row."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.device.ops.axes import CODES, IO, K, M, formats
from quantkit.device.ops.checks import IO_DTYPES, check_quantize, check_scalar, given, io_word
from quantkit.device.ops.op import (
    Argument,
    Axis,
    Budget,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
)
from quantkit.numerics.formats import find_format
from quantkit.numerics.scales import cast

#: Whether columns are smoothed before they are quantized.
SMOOTHING = Axis("QK_SMOOTH", ("", "smooth"))


def quantize_static(x: Tensor, smooth: Tensor | None, scale: Tensor, fmt: str) -> Tensor:
    """Return the codes of ``x * smooth / scale``, saturated; NaN stays NaN.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        smooth: (K,) float32, or None for ones.
        scale: float32 with one element.
        fmt: of the codes.

    Returns:
        (M, K) uint8.
    """
    return cast(_smoothed(x, smooth) / scale.reshape(()), find_format(fmt)).view(torch.uint8)


def quantize_token(x: Tensor, smooth: Tensor | None, fmt: str) -> tuple[Tensor, Tensor]:
    """Return a scale per row, amax(|x * smooth|) / max or 1.0 where that is 0, and codes.

    Args:
        x: (M, K) float16, bfloat16 or float32. NaN makes its row's scale NaN, and all its codes.
        smooth: (K,) float32, or None for ones.
        fmt: of the codes.

    Returns:
        (M,) float32 and (M, K) uint8.
    """
    values, target = _smoothed(x, smooth), find_format(fmt)
    amax = values.abs().amax(dim=1)
    # By a tensor: a GPU multiplies by the reciprocal of a Python number, which rounds otherwise.
    scale = amax / torch.full_like(amax, target.max)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, cast(values / scale.unsqueeze(1), target).view(torch.uint8)


def _smoothed(x: Tensor, smooth: Tensor | None) -> Tensor:
    return x.float() if smooth is None else x.float() * smooth


def smooth_word(smooth: Tensor | None) -> str:
    """Return the word of SMOOTHING."""
    return "" if smooth is None else "smooth"


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    (x, smooth, *scale), (fmt,) = operands, options
    x = given(x)
    check_quantize(op.name, x, smooth)
    for tensor in scale:
        check_scalar(op.name, "scale", given(tensor), x)
    words = (io_word(op.name, x.dtype), fmt, smooth_word(smooth))
    return Problem(words, {"m": x.shape[0], "k": x.shape[1]})


def _codes(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    m, k = given(operands[0]).shape
    return (((m, k), torch.uint8),)


def _scales_and_codes(operands: Operands, options: Options) -> tuple[Output, ...]:
    (codes,) = _codes(operands, options)
    return (codes[0][:1], torch.float32), codes


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, _, k = sizes
    x = torch.randn(m, k, generator=generator).to(IO_DTYPES[variant.word("QK_IO")])
    smooth = torch.rand(k, generator=generator) + 0.5 if variant.word("QK_SMOOTH") else None
    scale = (torch.tensor([0.013]),) if variant.op.family == "quantize_static" else ()
    return (x, smooth, *scale), (variant.word("QK_X_FORMAT"),)


#: Of results that follow from exact operations alone.
EXACT = Budget(
    0.0, 0.0, (0.0, 0.0), "divide, clamp and round are exact operations: bytes equal torch's"
)
_X = Argument("x", "io", "[m, k]")
_SMOOTH = Argument("smooth", "f32", "[k]", null="not smoothed (variants without _smooth)")
_Q = Argument("q", "u8", "[m, k]", written=True)


def _static(kind: str) -> Op:
    return _op(
        family="quantize_static",
        kind=kind,
        scale=Argument("scale", "f32", "[1]"),
        schema="(Tensor x, Tensor? smooth, Tensor scale, str x_format) -> Tensor",
        formula=f"q[i, j] = {kind}(clamp(x[i, j] * smooth[j] / scale[0], -max, max))",
        outputs=_codes,
        reference=quantize_static,
    )


def _token(kind: str) -> Op:
    return _op(
        family="quantize_token",
        kind=kind,
        scale=Argument("scale", "f32", "[m]", written=True),
        schema="(Tensor x, Tensor? smooth, str x_format) -> (Tensor, Tensor)",
        formula=(
            "scale[i] = amax_j(|x[i, j] * smooth[j]|) / max, or 1 if that is 0; "
            f"q[i, j] = {kind}(clamp(x[i, j] * smooth[j] / scale[i], -max, max))"
        ),
        outputs=_scales_and_codes,
        reference=quantize_token,
    )


def _op(
    *,
    family: str,
    kind: str,
    scale: Argument,
    schema: str,
    formula: str,
    outputs: Callable[[Operands, Options], tuple[Output, ...]],
    reference: Callable[..., object],
) -> Op:
    name = family.replace("quantize", f"quantize_{kind}")
    return Op(
        name=name,
        family=family,
        source=f"{family}.hip",
        formula=formula,
        schema=schema,
        axes=(
            IO,
            formats("X", kind),
            SMOOTHING,
        ),
        args=(_X, _SMOOTH, scale, _Q, M, K),
        k_multiple=1,
        check=_check,
        outputs=outputs,
        reference=reference,
        budget=EXACT,
        sample=_sample,
    )


OPS = tuple(of(kind) for kind in CODES for of in (_static, _token))
