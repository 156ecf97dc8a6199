"""Products fused with an activation and quantization."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.device.ops.axes import IO, K, M, N, formats
from quantkit.device.ops.checks import (
    IO_DTYPES,
    check_device,
    check_gemm,
    check_scalar,
    check_smoothing,
    expect,
    given,
    io_word,
)
from quantkit.device.ops.norms.quantize import quantize_static
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
from quantkit.device.ops.products.gemm import gemm
from quantkit.device.ops.products.stored_weights import (
    X_CODES,
    X_SCALE,
    named_weights,
    products,
    sample_product,
    scales_and_bias,
)
from quantkit.errors import KernelError, ShapeError


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


#: Word -> the function, on float32; tanh is gelu's approximation by it.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "tanh": _tanh_gelu,
}
#: What stands side by side begins at a multiple of so many columns.
_ALIGNED = 16
#: Few tokens are a product's and an activation's, and the tiles made for them not compiled.
TILE = Axis("QK_TILE", ("t0", "t1"))
#: Operands behind the product's.
_OTHERS = 3


def project_gelu(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    prefix: Tensor | None,
    smooth: Tensor | None,
    scale: Tensor,
    activation: str,
    x_format: str,
    w_format: str,
    y_format: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the codes of ``act(gemm)``, after those of ``prefix``.

    Args:
        x: (M, K) uint8 codes.
        x_scale: float32, one element or (M,).
        w: (N, K) uint8 codes.
        w_scale: float32, one element, (N,), or (N, K / G) with a scale per group along K.
        bias: (N,) any float dtype, or None.
        prefix: (M, L) in ``dtype``, whose codes stand first, or None; then L is 0.
        smooth: (L + N,), as ``quantize_static`` takes them.
        scale: float32 with one element.
        activation: of ACTIVATIONS.
        x_format: of x.
        w_format: of w.
        y_format: of the result.
        dtype: that the product and its activation are rounded to.

    Returns:
        (M, L + N) uint8.
    """
    y = gemm(x, x_scale, w, w_scale, bias, x_format, w_format, dtype)
    y = ACTIVATIONS[activation](y.float()).to(dtype)
    y = y if prefix is None else torch.cat([prefix, y], dim=1)
    return quantize_static(y, smooth, scale, y_format)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    product, others = operands[:-_OTHERS], operands[-_OTHERS:]
    (x, x_scale, *weights, w_scale, bias) = product
    activation, x_format, w_format, y_format, dtype = options
    x, x_scale, w_scale = given(x), given(x_scale), given(w_scale)
    check_gemm(op.name, x, x_scale, named_weights(op, weights), w_scale, bias, dtype)
    n = given(weights[0]).shape[0]
    if activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise KernelError(f"{op.name}: activation {activation!r}, expected one of {expected}")
    sizes = {
        "m": x.shape[0],
        "n": n,
        "k": x.shape[1],
        "prefix_columns": _check_others(op.name, x, n, others, dtype),
        "act": 1 + list(ACTIVATIONS).index(activation),
        "per_token": int(x_scale.numel() > 1),
        "per_channel": int(w_scale.numel() > 1),
        # Hopper has kernels of their own where nothing is smoothed.
        "changes": int(others[1] is not None),
    }
    words = (x_format, w_format, io_word(op.name, dtype), y_format)
    return Problem(words, sizes, group_scales=w_scale.ndim == 2)


def _check_others(op: str, x: Tensor, n: int, others: Operands, dtype: torch.dtype) -> int:
    """Return the columns of ``prefix``; refuse what does not fit x (M, K) and N outputs.

    Args:
        op: its name.
        x: codes.
        n: outputs.
        others: prefix, smooth and scale.
        dtype: of the activation.
    """
    prefix, smooth, scale = others
    columns = 0 if prefix is None else _check_prefix(op, x, n, prefix, dtype)
    check_smoothing(op, smooth, columns + n, x)
    check_scalar(op, "scale", given(scale), x)
    return columns


def _check_prefix(op: str, x: Tensor, n: int, prefix: Tensor, dtype: torch.dtype) -> int:
    """Return the columns left of N outputs."""
    expect(op, "prefix", prefix, dtype, (x.shape[0], prefix.shape[-1]))
    check_device(op, "prefix", prefix, x)
    columns = prefix.shape[1]
    if columns % _ALIGNED or n % _ALIGNED:
        raise ShapeError(
            f"{op}: {columns} prefix columns before {n}, expected multiples of {_ALIGNED}"
        )
    return columns


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    x, w, prefix = given(operands[0]), given(operands[2]), operands[-_OTHERS]
    prefix_columns = 0 if prefix is None else prefix.shape[1]
    return (((x.shape[0], prefix_columns + w.shape[0]), torch.uint8),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    dtype = IO_DTYPES[variant.word("QK_IO")]
    kinds = (variant.word(f"QK_{of}_FORMAT") for of in "XWY")
    prefix_columns = 2 * _ALIGNED if n % 2 == 0 else 0
    columns = _ALIGNED * (n // _ALIGNED + 1) if prefix_columns else n
    product = sample_product(variant, (m, k), columns, k, generator, per_row=m % 3 > 0)
    prefix = (
        torch.randn(m, prefix_columns, generator=generator).to(dtype) if prefix_columns else None
    )
    smooth = torch.rand(prefix_columns + columns, generator=generator) + 0.5 if m % 2 else None
    activation = list(ACTIVATIONS)[(m + k) % len(ACTIVATIONS)]
    return (*product, prefix, smooth, torch.tensor([0.013])), (activation, *kinds, dtype)


_NEAR = Budget(
    1e-6,
    0.0,
    (1.5, 1.0),
    "sums in another order, and an activation within its own error, move a value across the "
    "boundary between two codes",
)
_REQUIRES = (f"prefix_columns % {_ALIGNED} == 0", f"prefix_columns * (n % {_ALIGNED}) == 0")


def _dense(kind: str, k_multiple: int) -> Op:
    return Op(
        name=f"project_gelu_{kind}",
        family="project_gelu",
        source="project_gelu.hip",
        formula=(
            f"q[i, prefix_columns + j] = {kind}(clamp(act(y[i, j]) * smooth[prefix_columns + j] / "
            f"scale[0], -max, max)), y of gemm_{kind} and act(y) rounded; before it prefix's codes"
        ),
        schema=(
            "(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, Tensor? prefix, "
            "Tensor? smooth, Tensor scale, str activation, str x_format, "
            "str w_format, str y_format, ScalarType dtype) -> Tensor"
        ),
        axes=(formats("X", kind), formats("W", kind), IO, formats("Y", kind), TILE),
        args=(
            *(X_CODES, X_SCALE, Argument("w", "u8", "[n, k]"), *scales_and_bias("n")),
            Argument("prefix", "io", "[m, prefix_columns]", null="no prefix: prefix_columns is 0"),
            Argument("smooth", "f32", "[prefix_columns + n]", null="not smoothed"),
            Argument("scale", "f32", "[1]"),
            *(Argument("q", "u8", "[m, prefix_columns + n]", written=True), M, N, K),
            *(
                Argument(number, "i32")
                for number in ("prefix_columns", "act", "per_token", "per_channel")
            ),
        ),
        k_multiple=k_multiple,
        check=_check,
        outputs=_outputs,
        reference=project_gelu,
        budget=_NEAR,
        sample=_sample,
        requires=_REQUIRES,
    )


OPS = products(_dense)
