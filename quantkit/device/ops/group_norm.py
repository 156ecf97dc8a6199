"""Group norms of pictures with channels last, and the codes of what follows them."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor

from quantkit.device.ops.checks import IO_DTYPES, check_device, eps_bits, expect, given, io_word
from quantkit.device.ops.norm_rows import (
    INPUT_ARGS,
    INPUT_AXIS,
    check_input,
    codes_of,
    input_word,
    sample_input,
)
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
from quantkit.device.ops.products import CODES, IO, K, M, N, formats
from quantkit.errors import ShapeError
from quantkit.numerics import norms

#: What stands between a norm and its codes.
ACTIVATIONS = ("", "silu")
#: Channels that a lane loads at once.
_ALIGNED = 8


def group_partials(x: Tensor, added: Tensor | None) -> Tensor:
    """Return the moments of every 64 pixels of ``x + added``, by channel.

    Args:
        x: (B, T, C) float16, bfloat16 or float32.
        added: (B, C) of the same dtype, or None for zeros.

    Returns:
        (B, ceil(T / 64), C, 2) float32: mean, and sum of squared distances from it.
    """
    return norms.partial_moments(_sum(x, added))


def group_moments(partials: Tensor, pixels: int, groups: int, eps: float) -> Tensor:
    """Return mean and 1 / sqrt(variance + eps) of groups: (B, groups, 2) float32."""
    return norms.group_moments(partials, pixels, groups, eps)


def group_norm_codes(
    x: Tensor,
    added: Tensor | None,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    smooth: Tensor | None,
    shift: Tensor | None,
    scale: Tensor,
    activation: str,
    fmt: str,
) -> Tensor:
    """Return the codes of ``act(norm(x + added))``, (B, T, C) uint8.

    Args:
        x: (B, T, C) float16, bfloat16 or float32.
        added: (B, C) of the same dtype, or None.
        moments: (B, G, 2) float32, of ``group_moments``.
        weight, bias: (C,) of x's dtype, or None.
        smooth, shift: as ``quantize_static`` takes them.
        scale: float32 with one element.
        activation: of ACTIVATIONS.
        fmt: of the codes.
    """
    width = x.shape[2] // max(moments.shape[1], 1)
    mean, inverse = moments.repeat_interleave(width, dim=1).unsqueeze(1).unbind(-1)
    factor = inverse if weight is None else inverse * weight.float()
    y = (_sum(x, added) - mean) * factor
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    if activation:
        y = torch.nn.functional.silu(y.float()).to(x.dtype)
    return codes_of(y, smooth, shift, scale, fmt)


def _sum(x: Tensor, added: Tensor | None) -> Tensor:
    return (x if added is None else x + added.unsqueeze(1)).float()


def _check_pictures(op: str, x: Tensor, added: Tensor | None) -> str:
    word = io_word(op, x.dtype)
    if x.ndim != 3 or x.shape[2] % _ALIGNED or not x.shape[1]:
        raise ShapeError(
            f"{op}: x is {tuple(x.shape)}, wanted (B, T, C), C a multiple of {_ALIGNED}"
        )
    if added is not None:
        expect(op, "added", added, x.dtype, (x.shape[0], x.shape[2]))
        check_device(op, "added", added, x)
    return word


def _numbers(x: Tensor) -> dict[str, int]:
    return {"m": x.shape[1], "n": x.shape[0], "k": x.shape[2]}


def _check_partials(op: Op, operands: Operands, options: Options) -> Problem:
    del options
    x = given(operands[0])
    return Problem((_check_pictures(op.name, x, operands[1]),), _numbers(x))


def _check_moments(op: Op, operands: Operands, options: Options) -> Problem:
    partials, (pixels, groups, eps) = given(operands[0]), options
    batch, channels = partials.shape[0], partials.shape[2]
    chunks = -(-pixels // norms.CHUNK)
    expect(op.name, "partials", partials, torch.float32, (batch, chunks, channels, 2))
    _check_groups(op.name, groups, channels)
    sizes = {"m": groups, "n": batch, "k": channels, "pixels": pixels}
    return Problem(("f32",), sizes | {"eps": eps_bits(op.name, eps)})


def _check_groups(op: str, groups: int, channels: int) -> None:
    if groups < 1 or channels % groups:
        raise ShapeError(f"{op}: {groups} groups of {channels} channels, wanted a divisor")


def _check_codes(op: Op, operands: Operands, options: Options) -> Problem:
    x, added, moments, weight, bias, smooth, shift, scale = operands
    x, moments, (activation, fmt) = given(x), given(moments), options
    word = _check_pictures(op.name, x, added)
    batch, channels = x.shape[0], x.shape[2]
    groups = moments.shape[1] if moments.ndim > 1 else 0
    _check_groups(op.name, groups, channels)
    expect(op.name, "moments", moments, torch.float32, (batch, groups, 2))
    check_input(op.name, x, (weight, bias, smooth, shift), given(scale))
    words = (word, fmt, activation, input_word(smooth, shift))
    return Problem(words, _numbers(x) | {"groups": groups})


def _partial_shape(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    batch, pixels, channels = given(operands[0]).shape
    return (((batch, -(-pixels // norms.CHUNK), channels, 2), torch.float32),)


def _moment_shape(operands: Operands, options: Options) -> tuple[Output, ...]:
    return (((given(operands[0]).shape[0], options[1], 2), torch.float32),)


def _code_shape(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    return ((tuple(given(operands[0]).shape), torch.uint8),)


#: Of samples: divides all of their channels.
_GROUPS = 32
_EPS = 1e-5


def _pictures(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    pixels, batch, channels = sizes
    dtype = IO_DTYPES[variant.word("QK_IO")]
    x = torch.randn(min(batch, 2), pixels, channels, generator=generator) + 3
    added = torch.randn(min(batch, 2), channels, generator=generator)
    return x.to(dtype), added.to(dtype) if batch % 2 else None


def _sample_partials(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    return _pictures(variant, sizes, generator), ()


def _sample_moments(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    del variant
    pixels, batch, channels = sizes
    x = torch.randn(min(batch, 2), pixels, channels, generator=generator) + 3
    return (norms.partial_moments(x),), (pixels, _GROUPS, _EPS)


def _sample_codes(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    x, added = _pictures(variant, sizes, generator)
    moments = group_moments(group_partials(x, added), x.shape[1], _GROUPS, _EPS)
    numbers = torch.randn(2, x.shape[2], generator=generator).to(x.dtype).unbind()
    operands = (x, added, moments, *numbers, *sample_input(variant, x.shape[2], generator))
    return operands, (variant.word("QK_ACT"), variant.word("QK_X_FORMAT"))


_EXACT = Budget(0.0, 0.0, (0.0, 0.0), "sums have one order, and every step is rounded once")
_NEAR = Budget(
    1e-9, 0.0, (0.0, 0.0), "silu is within 4e-7 of its value: a code is the nearest of its rounding"
)
_X, _ADDED = Argument("x", "io", "[n, m, k]"), Argument("added", "io", "[n, k]", null="zeros")
_PARTIALS = "[n, ceil_div(m, 64), k, 2]"
_NORM = "(x[n, t, c] + added[n, c] - moments[n, g, 0]) * moments[n, g, 1] * weight[c] + bias[c]"


def _codes(kind: str) -> Op:
    return Op(
        name=f"group_norm_codes_{kind}",
        family="group_norm_codes",
        source="group_norm_codes.hip",
        formula=(
            f"q[n, t, c] = {kind}(clamp((act({_NORM}) - shift[c]) * smooth[c] / scale[0], "
            "-max, max)), g = c // (k / groups)"
        ),
        schema=(
            "(Tensor x, Tensor? added, Tensor moments, Tensor? weight, Tensor? bias, "
            "Tensor? smooth, Tensor? shift, Tensor scale, str activation, str x_format) -> Tensor"
        ),
        axes=(IO, formats("X", kind), Axis("QK_ACT", ACTIVATIONS), INPUT_AXIS),
        args=(
            *(_X, _ADDED, Argument("moments", "f32", "[n, groups, 2]")),
            *INPUT_ARGS,
            *(Argument("q", "u8", "[n, m, k]", written=True), M, N, K, Argument("groups", "i32")),
        ),
        k_multiple=_ALIGNED,
        check=_check_codes,
        outputs=_code_shape,
        reference=group_norm_codes,
        budget=_NEAR,
        sample=_sample_codes,
        requires=("k % groups == 0",),
    )


OPS = (
    Op(
        name="group_partials",
        family="group_partials",
        source="group_partials.hip",
        formula=(
            "partials[n, t / 64, c] = mean, and sum of squared distances from it, of "
            "x[n, t, c] + added[n, c]"
        ),
        schema="(Tensor x, Tensor? added) -> Tensor",
        axes=(IO,),
        args=(_X, _ADDED, Argument("partials", "f32", _PARTIALS, written=True), M, N, K),
        k_multiple=_ALIGNED,
        check=_check_partials,
        outputs=_partial_shape,
        reference=group_partials,
        budget=_EXACT,
        sample=_sample_partials,
    ),
    Op(
        name="group_moments",
        family="group_moments",
        source="group_moments.hip",
        formula="moments[n, g] = mean, 1 / sqrt(variance + eps), of channels g * k / m on",
        schema="(Tensor partials, int pixels, int groups, float eps) -> Tensor",
        axes=(Axis("QK_MOMENTS", ("f32",)),),
        args=(
            Argument("partials", "f32", "[n, ceil_div(pixels, 64), k, 2]"),
            Argument("moments", "f32", "[n, m, 2]", written=True),
            *(M, N, K, Argument("pixels", "i32"), Argument("eps", "i32")),
        ),
        k_multiple=1,
        check=_check_moments,
        outputs=_moment_shape,
        reference=group_moments,
        budget=_EXACT,
        sample=_sample_moments,
        requires=("k % m == 0",),
    ),
    *(_codes(kind) for kind in CODES),
)
