"""Three projections of one input to codes of attention's heads in one launch.

What is computed is ``project_codes`` of queries and keys and ``project_values`` of values, to the
bit; factors of heads, and means that are taken off, are in scales and biases as there.
"""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

import torch
from torch import Tensor

from quantkit.device.ops.attention.projections import (
    BUDGET,
    REQUIRES,
    TILE,
    WIDTH,
    project_codes,
    project_values,
    rows_of_heads,
    sizes_of_heads,
)
from quantkit.device.ops.attention.streams import ALIGNED
from quantkit.device.ops.axes import K, M, N, formats
from quantkit.device.ops.checks import check_gemm, given
from quantkit.device.ops.op import (
    Argument,
    Op,
    Operands,
    Options,
    Output,
    Problem,
    Variant,
    WeightKind,
)
from quantkit.device.ops.products.stored_weights import (
    THREE,
    X_CODES,
    X_SCALE,
    named_weights,
    products,
    sample_product,
)
from quantkit.errors import ShapeError
from quantkit.numerics.attention_factors import RUN, padded


def project_heads(
    x: Tensor,
    x_scale: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    w_scale: Tensor,
    bias: Tensor,
    tokens: int,
    heads: int,
    x_format: str,
    w_format: str,
    *,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return e4m3fn codes of queries, keys and, transposed, values; see ``project_codes``.

    Args:
        x: (M, K) uint8 codes, M the tokens of all pictures.
        x_scale: float32, one element or (M,).
        wq: (N, K) uint8 codes, N = heads * d, d a multiple of 8.
        wk: likewise.
        wv: likewise.
        w_scale: float32 (3, N).
        bias: float32 (3, N).
        tokens: of a picture.
        heads: of a picture.
        x_format: of x.
        w_format: of the weights.
        precision: of products and sums.
    """
    ends = (project_codes, project_codes, project_values)
    q, k, v = (
        end(
            x, x_scale, w, scale, added, tokens, heads, x_format, w_format, precision=precision
        )
        for end, w, scale, added in zip(ends, (wq, wk, wv), w_scale, bias, strict=True)
    )  # fmt: skip
    return q, k, v


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    x, x_scale, *weights, w_scale, bias = map(given, operands)
    tokens, heads, x_format, w_format = options
    named = named_weights(op, weights)
    m, n, each = x.shape[0], weights[0].shape[0], len(named) // len(THREE)
    for name, numbers in (("w_scale", w_scale), ("bias", bias)):
        if numbers.shape != (len(THREE), n):
            raise ShapeError(
                f"{op.name}: {name} has shape {tuple(numbers.shape)}, expected {(len(THREE), n)}"
            )
    for i, (scale, added) in enumerate(zip(w_scale, bias, strict=True)):
        own = named[each * i : each * (i + 1)]
        name, w, _ = own[0]
        if w.shape[0] != n:
            raise ShapeError(f"{op.name}: {name} has {w.shape[0]} rows, expected {n} as wq")
        check_gemm(op.name, x, x_scale, own, scale, added, torch.float32)
    sizes = sizes_of_heads(op.name, (m, n, x.shape[1]), tokens, heads, x_scale)
    return Problem((x_format, w_format), sizes)


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    rows, tokens, columns = rows_of_heads(operands, options)
    by_token = ((rows, tokens, columns), torch.uint8)
    return by_token, by_token, ((rows, columns, padded(tokens, RUN)), torch.uint8)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    heads, d = 3, ALIGNED * (1 + n % 9)
    kinds = (variant.word(f"QK_{of}_FORMAT") for of in "XW")
    each = [
        sample_product(variant, (m, k), heads * d, k, generator, per_row=m % 3 > 0) for _ in THREE
    ]
    x, x_scale, *_ = each[0]
    weights = (part for _, _, *stored, _, _ in each for part in stored)
    scales, biases = (torch.stack([parts[i] for parts in each]) for i in (-2, -1))
    operands = (x, x_scale, *weights, scales, biases)
    return operands, (m if m % 2 else m // 2, heads, *kinds)


def _dense(kind: str, k_multiple: int) -> Op:
    by_token = f"[m // tokens * n // d, tokens, {WIDTH}]"
    by_column = f"[m // tokens * n // d, {WIDTH}, ceil_div(tokens, {RUN}) * {RUN}]"
    return Op(
        name=f"project_heads_{kind}",
        family="project_heads",
        source="project_heads.hip",
        formula=(
            f"project_codes_{kind} of x, wq and of x, wk; project_values_{kind} of x, wv; with "
            "rows 0, 1 and 2 of w_scale and bias"
        ),
        schema=(
            "(Tensor x, Tensor x_scale, Tensor wq, Tensor wk, Tensor wv, Tensor w_scale, "
            "Tensor bias, int tokens, int heads, str x_format, str w_format) "
            "-> (Tensor, Tensor, Tensor)"
        ),
        axes=(formats("X", kind), formats("W", kind), TILE),
        args=(
            *(X_CODES, X_SCALE),
            *(Argument(w, "u8", "[n, k]") for w in THREE),
            *(Argument("w_scale", "f32", "[3, n]"), Argument("bias", "f32", "[3, n]")),
            *(Argument(f"{part}_codes", "u8", by_token, written=True) for part in "qk"),
            Argument("v_codes", "u8", by_column, written=True),
            *(M, N, K),
            *(Argument(number, "i32") for number in ("tokens", "d", "per_token")),
        ),
        k_multiple=k_multiple,
        check=_check,
        outputs=_outputs,
        reference=project_heads,
        budget=BUDGET,
        sample=_sample,
        rows_per_column=len(THREE),
        requires=REQUIRES,
    )


OPS = products(_dense, {"fp8": (WeightKind.DENSE, WeightKind.SPARSE), "int8": (WeightKind.DENSE,)})
