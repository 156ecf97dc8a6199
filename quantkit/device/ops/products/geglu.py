"""GEGLU on codes: one kernel multiplies, gates and quantizes."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.device.ops.axes import IO, K, M, N, formats
from quantkit.device.ops.checks import IO_DTYPES, check_gated, given, io_word, scale_words
from quantkit.device.ops.op import (
    Argument,
    Budget,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
)
from quantkit.device.ops.products.gemm import gemm
from quantkit.device.ops.products.stored_weights import (
    TILE,
    W_SCALE_AXIS,
    X_CODES,
    X_SCALE,
    X_SCALE_AXIS,
    named_weights,
    products,
    sample_product,
    scales_and_bias,
)
from quantkit.numerics.formats import find_format
from quantkit.numerics.scales import cast


def geglu(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    x_format: str,
    w_format: str,
    y_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the codes of ``h * gelu(g) / y_scale``, h and g the halves of ``gemm`` in float32.

    Nothing is rounded before it is gated.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (2 N, K) uint8 codes; the second half gates the first one.
        w_scale: float32, one element, (2 N,), or (2 N, K / G) with a scale per group along K.
        bias: (2 N,) any float dtype, or None.
        y_scale: float32 with one element.
        x_format: of x.
        w_format: of w.
        y_format: of the result.
        dtype: of the bias.

    Returns:
        (M, N) uint8, saturated; NaN stays NaN.
    """
    del dtype
    y = gemm(x, x_scale, w, w_scale, bias, x_format, w_format, torch.float32)
    return gate_static(y, y_scale, y_format)


def gate_static(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Return the codes of ``h * gelu(g) / scale``, saturated; NaN stays NaN.

    Args:
        x: (M, 2 K) float16, bfloat16 or float32: h, then g.
        scale: float32 with one element.
        fmt: of the codes.

    Returns:
        (M, K) uint8.
    """
    h, g = x.float().chunk(2, dim=1)
    values = h * functional.gelu(g) / scale.reshape(())
    return cast(values, find_format(fmt)).view(torch.uint8)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    x, x_scale, *weights, w_scale, bias, y_scale = operands
    x_format, w_format, y_format, dtype = options
    x, x_scale, w_scale = given(x), given(x_scale), given(w_scale)
    named = named_weights(op, weights)
    check_gated(op.name, x, x_scale, named, w_scale, bias, given(y_scale), dtype)
    scales = scale_words(x_scale, w_scale)
    words = (x_format, w_format, *scales, io_word(op.name, dtype), y_format)
    sizes = {"m": x.shape[0], "n": given(weights[0]).shape[0] // 2, "k": x.shape[1]}
    return Problem(words, sizes, group_scales=w_scale.ndim == 2)


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    x, _, w, *_ = operands
    return (((given(x).shape[0], given(w).shape[0] // 2), torch.uint8),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    kinds = (variant.word(f"QK_{of}_FORMAT") for of in "XWY")
    operands = sample_product(variant, (m, k), 2 * n, k, generator)
    return (*operands, torch.tensor([0.05])), (*kinds, IO_DTYPES[variant.word("QK_IO")])


def _dense(kind: str, k_multiple: int) -> Op:
    return Op(
        name=f"geglu_{kind}",
        family="geglu",
        source="geglu.hip",
        formula=(
            f"y[i, j] = {kind}(clamp(p[i, j] * gelu(p[i, n + j]) / y_scale[0], -max, max)), "
            f"p gemm_{kind}'s y of 2 n columns"
        ),
        schema=(
            "(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, "
            "Tensor y_scale, str x_format, str w_format, str y_format, ScalarType dtype) "
            "-> Tensor"
        ),
        axes=(
            *(formats("X", kind), formats("W", kind), X_SCALE_AXIS, W_SCALE_AXIS, IO),
            *(formats("Y", kind), TILE),
        ),
        args=(
            *(X_CODES, X_SCALE, Argument("w", "u8", "[2 n, k]"), *scales_and_bias("2 n")),
            Argument("y_scale", "f32", "[1]"),
            *(Argument("y", "u8", "[m, n]", written=True), M, N, K),
        ),
        k_multiple=k_multiple,
        check=_check,
        outputs=_outputs,
        reference=geglu,
        budget=Budget(
            0.0,
            0.0,
            (0.0, 0.0),
            "gelu is within 1.8e-4 of its value, 1.2e-7 where that is smaller: a code is the "
            "nearest of a number so near",
        ),
        sample=_sample,
        rows_per_column=2,
    )


OPS = products(_dense)
