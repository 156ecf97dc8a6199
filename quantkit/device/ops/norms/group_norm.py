"""Group norms of pictures with channels last, in 16 bit or as the codes of what follows them."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor

from quantkit.device.ops.axes import CODES, IO, K, M, N, formats
from quantkit.device.ops.checks import IO_DTYPES, check_device, eps_bits, expect, given, io_word
from quantkit.device.ops.norms.norm_rows import (
    INPUT_ARGS,
    check_columns,
    check_input,
    codes_of,
    sample_input,
)
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
from quantkit.errors import ShapeError
from quantkit.numerics import norms

#: What stands between a norm and its codes.
ACTIVATIONS = ("", "silu")
#: Channels that a lane loads at once.
_ALIGNED = 8


def group_partials(x: Tensor, added: Tensor | None, groups: int) -> Tensor:
    """Return the moments of every chunk of pixels of ``x + added``, by group of channels.

    Args:
        x: (B, T, C) float16, bfloat16 or float32.
        added: (B, C) of the same dtype, or None for zeros.
        groups: G, a divisor of C.

    Returns:
        (B, G, chunks, 2) float32: mean, and sum of squared distances from it.
    """
    return norms.partial_moments(_sum(x, added), groups)


def group_norm(
    x: Tensor,
    added: Tensor | None,
    partials: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor:
    """Return ``act(norm(x + added))``, (B, T, C) of x's dtype.

    Args:
        x: (B, T, C) float16, bfloat16 or float32.
        added: (B, C) of the same dtype, or None.
        partials: (B, G, chunks, 2) float32, of ``group_partials``.
        weight, bias: (C,) of x's dtype, or None.
        eps: added to variances.
        activation: of ACTIVATIONS.
    """
    moments = norms.group_moments(partials, x.shape[1], x.shape[2], eps)
    width = x.shape[2] // max(moments.shape[1], 1)
    mean, inverse = moments.repeat_interleave(width, dim=1).unsqueeze(1).unbind(-1)
    factor = inverse if weight is None else inverse * weight.float()
    y = norms.scaled(_sum(x, added) - mean, factor, bias).to(x.dtype)
    return torch.nn.functional.silu(y.float()).to(x.dtype) if activation else y


def group_norm_codes(
    x: Tensor,
    added: Tensor | None,
    partials: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    smooth: Tensor | None,
    scale: Tensor,
    eps: float,
    activation: str,
    fmt: str,
) -> Tensor:
    """Return the codes of ``group_norm``, (B, T, C) uint8.

    Args:
        x, added, partials, weight, bias, eps, activation: as ``group_norm`` takes them.
        smooth: as ``quantize_static`` takes them.
        scale: float32 with one element.
        fmt: of the codes.
    """
    y = group_norm(x, added, partials, weight, bias, eps, activation)
    return codes_of(y, smooth, scale, fmt)


def _sum(x: Tensor, added: Tensor | None) -> Tensor:
    return (x if added is None else x + added.unsqueeze(1)).float()


def _check_pictures(op: str, x: Tensor, added: Tensor | None) -> str:
    word = io_word(op, x.dtype)
    if x.ndim != 3 or not x.shape[1] or not _fits(x.shape[2]):
        raise ShapeError(
            f"{op}: x is {tuple(x.shape)}, expected (B, T, C), C a multiple of {_ALIGNED} and at "
            f"most {norms.MAX_CHANNELS}"
        )
    if added is not None:
        expect(op, "added", added, x.dtype, (x.shape[0], x.shape[2]))
        check_device(op, "added", added, x)
    return word


def _fits(channels: int) -> bool:
    return channels % _ALIGNED == 0 and 0 < channels <= norms.MAX_CHANNELS


def _numbers(x: Tensor) -> dict[str, int]:
    return {"m": x.shape[1], "n": x.shape[0], "k": x.shape[2]}


def _check_partials(op: Op, operands: Operands, options: Options) -> Problem:
    x, (groups,) = given(operands[0]), options
    word = _check_pictures(op.name, x, operands[1])
    _check_groups(op.name, groups, x.shape[2])
    return Problem((word,), _numbers(x) | {"groups": groups})


def _check_groups(op: str, groups: int, channels: int) -> None:
    if groups < 1 or channels % groups:
        raise ShapeError(f"{op}: {groups} groups of {channels} channels, expected a divisor")


def _check_norm(op: Op, operands: Operands, options: Options) -> Problem:
    word, numbers = _check_normed(op, operands[:5], options[0])
    return Problem((word, options[1]), numbers)


def _check_codes(op: Op, operands: Operands, options: Options) -> Problem:
    x, *_, smooth, scale = operands
    (eps, activation, fmt), x = options, given(x)
    word, numbers = _check_normed(op, operands[:5], eps)
    check_input(op.name, x, (None, None, smooth), given(scale))
    return Problem((word, fmt, activation, smooth_word(smooth)), numbers)


def _check_normed(op: Op, operands: Operands, eps: float) -> tuple[str, dict[str, int]]:
    """Refuse a picture, its moments and numbers; return io's word, and the sizes."""
    x, added, partials, weight, bias = operands
    x, partials = given(x), given(partials)
    word = _check_pictures(op.name, x, added)
    batch, pixels, channels = x.shape
    groups = partials.shape[1] if partials.ndim > 1 else 0
    _check_groups(op.name, groups, channels)
    expect(op.name, "partials", partials, torch.float32, _moments_of(batch, pixels, groups))
    check_device(op.name, "partials", partials, x)
    check_columns(op.name, x, (weight, bias))
    return word, _numbers(x) | {"groups": groups, "eps": eps_bits(op.name, eps)}


def _moments_of(batch: int, pixels: int, groups: int) -> tuple[int, int, int, int]:
    return batch, groups, -(-pixels // norms.chunk_pixels(pixels)), 2


def _partial_shape(operands: Operands, options: Options) -> tuple[Output, ...]:
    batch, pixels, _ = given(operands[0]).shape
    return ((_moments_of(batch, pixels, options[0]), torch.float32),)


def _norm_shape(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    x = given(operands[0])
    return ((tuple(x.shape), x.dtype),)


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
    return _pictures(variant, sizes, generator), (_GROUPS,)


def _sample_norm(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    x, added = _pictures(variant, sizes, generator)
    partials = group_partials(x, added, _GROUPS)
    numbers = torch.randn(2, x.shape[2], generator=generator).to(x.dtype).unbind()
    return (x, added, partials, *numbers), (_EPS, variant.word("QK_ACT"))


def _sample_codes(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    operands, options = _sample_norm(variant, sizes, generator)
    columns = given(operands[0]).shape[2]
    more = sample_input(variant, columns, generator)
    return (*operands, *more), (*options, variant.word("QK_X_FORMAT"))


_EXACT = Budget(0.0, 0.0, (0.0, 0.0), "sums have one order, and every step is rounded once")
_NEAR = Budget(
    1e-9,
    0.0,
    (0.0, 0.0),
    "silu is within 4e-7 of its value: a result is its nearest",
)
_X, _ADDED = Argument("x", "io", "[n, m, k]"), Argument("added", "io", "[n, k]", null="zeros")
_PARTIALS = "[n, groups, ceil_div(m, 16 * ceil_div(m, 2048)), 2]"
_MOMENTS = Argument("partials", "f32", _PARTIALS)
_GROUPED, _EPS_BITS = Argument("groups", "i32"), Argument("eps", "i32")
_ACT = Axis("QK_ACT", ACTIVATIONS)
_MERGED = "mean and variance of channel c's group, merged from partials"
_FITS = ("k % groups == 0", f"k <= {norms.MAX_CHANNELS}")
_NORM = "(x[n, t, c] + added[n, c] - mean) / sqrt(variance + eps) * weight[c] + bias[c]"


def _codes(kind: str) -> Op:
    return Op(
        name=f"group_norm_codes_{kind}",
        family="group_norm_codes",
        source="group_norm_codes.hip",
        formula=(
            f"q[n, t, c] = {kind}(clamp(act({_NORM}) * smooth[c] * (1 / scale[0]), "
            f"-max, max)), {_MERGED}"
        ),
        schema=(
            "(Tensor x, Tensor? added, Tensor partials, Tensor? weight, Tensor? bias, "
            "Tensor? smooth, Tensor scale, float eps, str activation, "
            "str x_format) -> Tensor"
        ),
        axes=(IO, formats("X", kind), _ACT, SMOOTHING),
        args=(
            *(_X, _ADDED, _MOMENTS, *INPUT_ARGS),
            *(Argument("q", "u8", "[n, m, k]", written=True), M, N, K, _GROUPED, _EPS_BITS),
        ),
        k_multiple=_ALIGNED,
        check=_check_codes,
        outputs=_code_shape,
        reference=group_norm_codes,
        budget=_NEAR,
        sample=_sample_codes,
        requires=_FITS,
    )


OPS = (
    Op(
        name="group_partials",
        family="group_partials",
        source="group_partials.hip",
        formula=(
            "partials[n, g, i] = mean, and sum of squared distances from it, of x[n, t, c] + "
            "added[n, c], t in the i-th of at most 128 chunks of pixels, c in group g"
        ),
        schema="(Tensor x, Tensor? added, int groups) -> Tensor",
        axes=(IO,),
        args=(_X, _ADDED, Argument("partials", "f32", _PARTIALS, written=True), M, N, K, _GROUPED),
        k_multiple=_ALIGNED,
        check=_check_partials,
        outputs=_partial_shape,
        reference=group_partials,
        budget=_EXACT,
        sample=_sample_partials,
        requires=_FITS,
    ),
    Op(
        name="group_norm",
        family="group_norm",
        source="group_norm.hip",
        formula=f"y[n, t, c] = act({_NORM}), {_MERGED}",
        schema=(
            "(Tensor x, Tensor? added, Tensor partials, Tensor? weight, Tensor? bias, "
            "float eps, str activation) -> Tensor"
        ),
        axes=(IO, _ACT),
        args=(
            *(_X, _ADDED, _MOMENTS, *INPUT_ARGS[:2]),
            *(Argument("y", "io", "[n, m, k]", written=True), M, N, K, _GROUPED, _EPS_BITS),
        ),
        k_multiple=_ALIGNED,
        check=_check_norm,
        outputs=_norm_shape,
        reference=group_norm,
        budget=_NEAR,
        sample=_sample_norm,
        requires=_FITS,
    ),
    *(_codes(kind) for kind in CODES),
)
