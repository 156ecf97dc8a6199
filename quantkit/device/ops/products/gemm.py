"""GEMM on codes: inputs times rows of weights, scaled, with a bias."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor

from quantkit.device.ops.axes import IO, K, M, N, formats
from quantkit.device.ops.checks import IO_DTYPES, check_gemm, given, io_word, scale_words
from quantkit.device.ops.op import Argument, Op, Operands, Options, Output, Problem, Variant
from quantkit.device.ops.products.residual import with_residual
from quantkit.device.ops.products.stored_weights import (
    SUMMED,
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
from quantkit.numerics.scales import decode


def gemm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_format: str,
    w_format: str,
    dtype: torch.dtype,
    *,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(x @ w.T) * x_scale * w_scale + bias``, rounded once to ``dtype``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (N, K) uint8 codes.
        w_scale: float32, one element, (N,), or (N, K / G) with a scale per group along K.
        bias: (N,) any float dtype, or None.
        x_format: of x.
        w_format: of w.
        dtype: of the result.
        precision: of products and sums; float64 makes them exact enough to judge the others by.

    Returns:
        (M, N) in ``dtype``.
    """
    weight = decode(w, w_format, precision)
    if w_scale.ndim == 2:
        groups = w_scale.repeat_interleave(w.shape[1] // w_scale.shape[1], dim=1)
        weight = weight * groups.to(precision)
    y = decode(x, x_format, precision) @ weight.T
    y = y * x_scale.reshape(-1, 1).to(precision)
    if w_scale.ndim < 2:
        y = y * w_scale.to(precision)
    return (y if bias is None else y + bias.to(precision)).to(dtype)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    (x, x_scale, *weights, w_scale, bias), (x_format, w_format, dtype) = operands, options
    x, x_scale, w_scale = given(x), given(x_scale), given(w_scale)
    check_gemm(op.name, x, x_scale, named_weights(op, weights), w_scale, bias, dtype)
    words = (x_format, w_format, *scale_words(x_scale, w_scale), io_word(op.name, dtype))
    sizes = {"m": x.shape[0], "n": given(weights[0]).shape[0], "k": x.shape[1]}
    return Problem(words, sizes, group_scales=w_scale.ndim == 2)


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    x, _, w, *_ = operands
    return (((given(x).shape[0], given(w).shape[0]), options[-1]),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    kinds = (variant.word(f"QK_{of}_FORMAT") for of in "XW")
    operands = sample_product(variant, (m, k), n, k, generator)
    return operands, (*kinds, IO_DTYPES[variant.word("QK_IO")])


def _dense(kind: str, k_multiple: int) -> Op:
    return Op(
        name=f"gemm_{kind}",
        family="gemm",
        source="gemm.hip",
        formula="y[i, j] = sum_k(x[i, k] * w[j, k]) * x_scale[i] * w_scale[j] + bias[j]",
        schema=(
            "(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, str x_format, "
            "str w_format, ScalarType dtype) -> Tensor"
        ),
        axes=(formats("X", kind), formats("W", kind), X_SCALE_AXIS, W_SCALE_AXIS, IO, TILE),
        args=(
            *(X_CODES, X_SCALE, Argument("w", "u8", "[n, k]"), *scales_and_bias("n")),
            *(Argument("y", "io", "[m, n]", written=True), M, N, K),
        ),
        k_multiple=k_multiple,
        check=_check,
        outputs=_outputs,
        reference=gemm,
        budget=SUMMED,
        sample=_sample,
    )


OPS = tuple(op for plain in products(_dense) for op in with_residual(plain))
