"""Activations between two layers, fused with quantization."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.device.ops.axes import CODES, IO, K, M, N, formats
from quantkit.device.ops.checks import (
    IO_DTYPES,
    check_device,
    check_scalar,
    check_smoothing,
    expect,
    given,
    io_word,
)
from quantkit.device.ops.norms.norm_rows import codes_of, sample_input
from quantkit.device.ops.norms.quantize import SMOOTHING, smooth_word
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
from quantkit.errors import KernelError, ShapeError


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


#: Word -> the function, on float32; tanh is gelu's approximation by it.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "tanh": _tanh_gelu,
}
#: Columns that a lane loads at once: what stands side by side begins at a multiple.
ALIGNED = 16


def gelu_codes(
    x: Tensor,
    prefix: Tensor | None,
    smooth: Tensor | None,
    scale: Tensor,
    activation: str,
    fmt: str,
) -> Tensor:
    """Return the codes of ``act(x)``, in x's dtype before; after those of ``prefix``.

    Args:
        x: (M, K - N) float16, bfloat16 or float32.
        prefix: (M, N) of the same dtype, quantized as it is, or None; then N is 0.
        smooth: (K,), as ``quantize_static`` takes them.
        scale: float32 with one element.
        activation: of ACTIVATIONS.
        fmt: of the codes.

    Returns:
        (M, K) uint8.
    """
    y = ACTIVATIONS[activation](x.float()).to(x.dtype)
    y = y if prefix is None else torch.cat([prefix, y], dim=1)
    return codes_of(y, smooth, scale, fmt)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    x, (activation, fmt) = given(operands[0]), options
    n = check_changes(op.name, x, operands[1:], activation)
    smooth = operands[2]
    words = (io_word(op.name, x.dtype), fmt, activation, smooth_word(smooth))
    return Problem(words, {"m": x.shape[0], "n": n, "k": n + x.shape[1]})


def check_changes(op: str, x: Tensor, others: Operands, activation: str) -> int:
    """Return the columns of ``prefix``; refuse operands that do not fit x (M, K - N).

    Args:
        op: its name.
        x: what is activated.
        others: prefix, smooth and scale.
        activation: of ACTIVATIONS, else it is refused.

    Raises:
        ShapeError: shapes that do not agree.
        KernelError: a dtype that is not the operation's, operands on several devices, or an
            activation that there is not.
    """
    prefix, smooth, scale = others
    if activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise KernelError(f"{op}: activation {activation!r}, expected one of {expected}")
    if x.ndim != 2:
        raise ShapeError(f"{op}: x has shape {tuple(x.shape)}, expected (M, K)")
    io_word(op, x.dtype)
    n = _check_prefix(op, x, prefix)
    check_smoothing(op, smooth, n + x.shape[1], x)
    check_scalar(op, "scale", given(scale), x)
    return n


def _check_prefix(op: str, x: Tensor, prefix: Tensor | None) -> int:
    """Return the columns left of x's."""
    if prefix is None:
        return 0
    expect(op, "prefix", prefix, x.dtype, (x.shape[0], prefix.shape[-1]))
    check_device(op, "prefix", prefix, x)
    columns = prefix.shape[1]
    if columns % ALIGNED or x.shape[1] % ALIGNED:
        raise ShapeError(
            f"{op}: {columns} prefix columns before {x.shape[1]}, expected multiples of {ALIGNED}"
        )
    return columns


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    x, prefix = given(operands[0]), operands[1]
    columns = x.shape[1] if prefix is None else x.shape[1] + prefix.shape[1]
    return (((x.shape[0], columns), torch.uint8),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    y = (torch.randn(m, k, generator=generator) * 2).to(IO_DTYPES[variant.word("QK_IO")])
    columns = k // 3 // ALIGNED * ALIGNED if n % 2 and k % ALIGNED == 0 else 0
    rows = (y[:, columns:].contiguous(), y[:, :columns].contiguous() if columns else None)
    changes = sample_input(variant, k, generator)
    return (*rows, *changes), (variant.word("QK_ACT"), variant.word("QK_X_FORMAT"))


_NEAR = Budget(
    *(1e-9, 0.0, (0.0, 0.0)),
    "gelu is within 1.8e-4 of its value, 1.3e-7 where that is smaller, silu and tanh within 4e-6: "
    "a code is the nearest of its rounding",
)


def _op(kind: str) -> Op:
    return Op(
        name=f"gelu_codes_{kind}",
        family="gelu_codes",
        source="gelu_codes.hip",
        formula=(
            f"q[i, j] = {kind}(clamp(y[i, j] * smooth[j] / scale[0], -max, max)), "
            "y[i, j] = prefix[i, j] where j < n, else act(x[i, j - n])"
        ),
        schema=(
            "(Tensor x, Tensor? prefix, Tensor? smooth, Tensor scale, "
            "str activation, str x_format) -> Tensor"
        ),
        axes=(IO, formats("X", kind), Axis("QK_ACT", tuple(ACTIVATIONS), first=1), SMOOTHING),
        args=(
            Argument("x", "io", "[m, k - n]"),
            Argument("prefix", "io", "[m, n]", null="no prefix: n is 0"),
            Argument("smooth", "f32", "[k]", null="not smoothed (variants without _smooth)"),
            Argument("scale", "f32", "[1]"),
            *(Argument("q", "u8", "[m, k]", written=True), M, N, K),
        ),
        k_multiple=1,
        check=_check,
        outputs=_outputs,
        reference=gelu_codes,
        budget=_NEAR,
        sample=_sample,
        requires=(f"n % {ALIGNED} == 0", f"n * (k % {ALIGNED}) == 0"),
    )


OPS = tuple(_op(kind) for kind in CODES)
