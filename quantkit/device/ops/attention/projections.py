"""Projections fused with quantization to codes of attention's heads.

Factors of heads, and means that are taken off, are in the scales of channels and the bias: with
a factor a and a mean mu of a head, w_scale a and (bias - mu) a.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.device.ops.attention.streams import ALIGNED
from quantkit.device.ops.axes import CODES, K, M, N, formats
from quantkit.device.ops.checks import check_gemm, given
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
    WeightKind,
)
from quantkit.device.ops.products.gemm import gemm
from quantkit.device.ops.products.stored_weights import (
    X_CODES,
    X_SCALE,
    named_weights,
    products,
    sample_product,
)
from quantkit.errors import ShapeError
from quantkit.numerics.attention_factors import COLUMNS, RUN, padded
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.scales import cast

#: Few tokens are not worth codes, and the tiles made for them not their compilation.
TILE = Axis("QK_TILE", ("t0", "t1"))


def project_codes(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    tokens: int,
    heads: int,
    x_format: str,
    w_format: str,
    *,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return e4m3fn codes of ``(x @ w.T) * x_scale * w_scale + bias``, saturated, by head.

    Args:
        x: (M, K) uint8 codes, M the tokens of all pictures.
        x_scale: float32, one element or (M,).
        w: (N, K) uint8 codes, N = heads * d, d a multiple of 8.
        w_scale: float32 (N,).
        bias: (N,) float32, or None.
        tokens: of a picture.
        heads: of a picture.
        x_format: of x.
        w_format: of w.
        precision: of products and sums.

    Returns:
        (M / tokens * heads, tokens, D) uint8, D = d up to a multiple of 16; zero behind d.
    """
    codes = _codes(x, x_scale, w, w_scale, bias, (tokens, heads), (x_format, w_format), precision)
    return pad(codes, (0, padded(codes.shape[2]) - codes.shape[2]))


def project_values(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    tokens: int,
    heads: int,
    x_format: str,
    w_format: str,
    *,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return the codes of ``project_codes``, transposed.

    Args:
        x: (M, K) uint8 codes, M the tokens of all pictures.
        x_scale: float32, one element or (M,).
        w: (N, K) uint8 codes, N = heads * d, d a multiple of 8.
        w_scale: float32 (N,).
        bias: (N,) float32, or None.
        tokens: of a picture.
        heads: of a picture.
        x_format: of x.
        w_format: of w.
        precision: of products and sums.

    Returns:
        (M / tokens * heads, D, pitch) uint8, D = d and pitch = tokens up to multiples of 16; zero
        behind d and tokens.
    """
    codes = _codes(x, x_scale, w, w_scale, bias, (tokens, heads), (x_format, w_format), precision)
    d = codes.shape[2]
    return pad(codes.transpose(1, 2), (0, padded(tokens, RUN) - tokens, 0, padded(d) - d))


def _codes(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    places: tuple[int, int],
    kinds: tuple[str, str],
    precision: torch.dtype,
) -> Tensor:
    tokens, heads = places
    y = gemm(x, x_scale, w, w_scale, bias, *kinds, torch.float32, precision=precision)
    by_head = y.reshape(-1, tokens, heads, w.shape[0] // heads).transpose(1, 2).flatten(0, 1)
    return cast(by_head, E4M3FN).view(torch.uint8)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    (x, x_scale, *weights, w_scale, bias), (tokens, heads, x_format, w_format) = operands, options
    x, x_scale, w_scale = given(x), given(x_scale), given(w_scale)
    named = named_weights(op, weights)
    check_gemm(op.name, x, x_scale, named, w_scale, bias, torch.float32)
    m, n = x.shape[0], named[0][1].shape[0]
    if w_scale.shape[:1] != (n,):
        raise ShapeError(f"{op.name}: w_scale has shape {tuple(w_scale.shape)}, expected ({n},)")
    sizes = sizes_of_heads(op.name, (m, n, x.shape[1]), tokens, heads, x_scale)
    return Problem((x_format, w_format), sizes, group_scales=w_scale.ndim == 2)


def sizes_of_heads(
    op: str, sizes: tuple[int, int, int], tokens: int, heads: int, x_scale: Tensor
) -> dict[str, int]:
    """Return the integers of a projection by name.

    Args:
        op: for errors.
        sizes: M, N and K.
        tokens: of a picture.
        heads: of a picture.
        x_scale: of all tokens, or of each.

    Raises:
        ShapeError: pictures or heads that are not whole.
    """
    m, n, k = sizes
    if tokens < 1 or m % tokens:
        raise ShapeError(f"{op}: {m} rows in pictures of {tokens} tokens, expected whole ones")
    if heads < 1 or n % (heads * ALIGNED):
        raise ShapeError(
            f"{op}: {heads} heads of {n} outputs, expected multiples of {ALIGNED} for each"
        )
    per_token = int(x_scale.numel() > 1)
    return {"m": m, "n": n, "k": k, "tokens": tokens, "d": n // heads, "per_token": per_token}


def rows_of_heads(operands: Operands, options: Options) -> tuple[int, int, int]:
    """Return rows of heads, tokens and padded columns of a result."""
    x, _, w, *_ = operands
    tokens, heads, *_ = options
    return given(x).shape[0] // tokens * heads, tokens, padded(given(w).shape[0] // heads)


def _by_token(operands: Operands, options: Options) -> tuple[Output, ...]:
    return ((rows_of_heads(operands, options), torch.uint8),)


def _transposed(operands: Operands, options: Options) -> tuple[Output, ...]:
    rows, tokens, columns = rows_of_heads(operands, options)
    return (((rows, columns, padded(tokens, RUN)), torch.uint8),)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    heads, d = 3, ALIGNED * (1 + n % 9)
    kinds = (variant.word(f"QK_{of}_FORMAT") for of in "XW")
    operands = sample_product(variant, (m, k), heads * d, k, generator, per_row=m % 3 > 0)
    return operands, (m if m % 2 else m // 2, heads, *kinds)


BUDGET = Budget(
    1e-6,
    0.0,
    (1.5, 1.0),
    "sums in another order move a value across the boundary between two codes",
)
WIDTH = f"ceil_div(d, {COLUMNS}) * {COLUMNS}"
REQUIRES = (f"d % {ALIGNED} == 0", "n % d == 0", "m % tokens == 0")
_FORMULA = (
    "codes[b * heads + h, {place}] = e4m3fn(clamp(sum_k(x[i, k] * w[j, k]) * x_scale[i] * "
    "w_scale[j] + bias[j], -max, max)), i = b * tokens + t, j = h * d + c"
)


def _op(
    kind: str,
    k_multiple: int,
    family: str,
    *,
    place: str,
    shape: str,
    outputs: Callable[[Operands, Options], tuple[Output, ...]],
    reference: Callable[..., Any],
) -> Op:
    return Op(
        name=f"{family}_{kind}",
        family=family,
        source=f"{family}.hip",
        formula=_FORMULA.format(place=place),
        schema=(
            "(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias, int tokens, "
            "int heads, str x_format, str w_format) -> Tensor"
        ),
        axes=(formats("X", kind), formats("W", kind), TILE),
        args=(
            *(X_CODES, X_SCALE, Argument("w", "u8", "[n, k]"), Argument("w_scale", "f32", "[n]")),
            Argument("bias", "f32", "[n]", null="no bias"),
            Argument("codes", "u8", shape, written=True),
            *(M, N, K),
            *(Argument(number, "i32") for number in ("tokens", "d", "per_token")),
        ),
        k_multiple=k_multiple,
        check=_check,
        outputs=outputs,
        reference=reference,
        budget=BUDGET,
        sample=_sample,
        requires=REQUIRES,
    )


def _rows(kind: str, k_multiple: int) -> Op:
    return _op(
        kind,
        k_multiple,
        "project_codes",
        place="t, c",
        shape=f"[m // tokens * n // d, tokens, {WIDTH}]",
        outputs=_by_token,
        reference=project_codes,
    )


def _columns(kind: str, k_multiple: int) -> Op:
    return _op(
        kind,
        k_multiple,
        "project_values",
        place="c, t",
        shape=f"[m // tokens * n // d, {WIDTH}, ceil_div(tokens, {RUN}) * {RUN}]",
        outputs=_transposed,
        reference=project_values,
    )


OPS = (*products(_rows), *products(_columns, dict.fromkeys(CODES, (WeightKind.DENSE,))))
