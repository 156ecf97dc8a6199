"""LayerNorm and RMSNorm of rows, or of a sum, with their modulation, and the codes of them."""

# ruff: noqa: PLR0917  operands stand in the order of the kernel arguments

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.device.ops.axes import CODES, IO, K, M, N, formats
from quantkit.device.ops.checks import IO_DTYPES, check_device, eps_bits, expect, given, io_word
from quantkit.device.ops.norms.norm_rows import INPUT_ARGS, check_input, codes_of, sample_input
from quantkit.device.ops.norms.quantize import SMOOTHING, smooth_word
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
from quantkit.errors import ShapeError
from quantkit.numerics import norms

#: Values that a lane loads at once.
_ALIGNED = 8
#: Operands that modulate a norm.
_MODULATION = ("modulation_scale", "modulation_shift")


def layer_norm_codes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation_scale: Tensor | None,
    modulation_shift: Tensor | None,
    smooth: Tensor | None,
    scale: Tensor,
    eps: float,
    centred: bool,  # noqa: FBT001  the schema's
    fmt: str,
) -> Tensor:
    """Return the codes of ``norm(x) * (1 + modulation_scale) + modulation_shift``, (M, K) uint8.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        weight, bias: (K,) of x's dtype, or None.
        modulation_scale, modulation_shift: (B, K) of x's dtype, or None; each for M / B rows.
        smooth: as ``quantize_static`` takes them.
        scale: float32 with one element.
        eps: added to variances.
        centred: LayerNorm; else RMSNorm.
        fmt: of the codes.
    """
    y = norms.layer_norm(x.float(), centred=centred, eps=eps)
    y = norms.scaled(y, weight, bias).to(x.dtype)
    if modulation_scale is not None:
        y = y * (1 + _for_rows(modulation_scale, x))
    if modulation_shift is not None:
        y = y + _for_rows(modulation_shift, x)
    return codes_of(y, smooth, scale, fmt)


def sum_norm_codes(
    x: Tensor,
    added: Tensor,
    gate: Tensor | None,
    *operands: Any,
) -> tuple[Tensor, Tensor]:
    """Return ``x + gate * added`` in x's dtype, as torch rounds it, and ``layer_norm_codes`` of it.

    Args:
        x: as there.
        added: as x.
        gate: (B, K) of x's dtype, for M / B rows each, or None for ones.
        operands: as there, from ``weight`` on.
    """
    total = x + (added if gate is None else _for_rows(gate, x) * added)
    return total, layer_norm_codes(total, *operands)


def _for_rows(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.repeat_interleave(x.shape[0] // max(numbers.shape[0], 1), dim=0)


def _check(op: Op, operands: Operands, options: Options) -> Problem:
    x, *others = operands
    return _check_norm(op, given(x), None, tuple(others), options)


def _check_sum(op: Op, operands: Operands, options: Options) -> Problem:
    x, added, gate, *others = operands
    x, added = given(x), given(added)
    expect(op.name, "added", added, x.dtype, tuple(x.shape))
    check_device(op.name, "added", added, x)
    return _check_norm(op, x, gate, tuple(others), options)


def _check_norm(
    op: Op, x: Tensor, gate: Tensor | None, operands: Operands, options: Options
) -> Problem:
    weight, bias, *modulation, smooth, scale = operands
    eps, centred, fmt = options
    word = io_word(op.name, x.dtype)
    if x.ndim != 2 or x.shape[1] % _ALIGNED:
        raise ShapeError(
            f"{op.name}: x is {tuple(x.shape)}, expected (M, K), K a multiple of {_ALIGNED}"
        )
    check_input(op.name, x, (weight, bias, smooth), given(scale))
    given_rows = dict(zip(("gate", *_MODULATION), (gate, *modulation), strict=True))
    batch = _check_modulation(op.name, x, given_rows)
    words = (word, fmt, smooth_word(smooth))
    m, k = x.shape
    sizes = {"m": m, "n": norms.row_lanes(k), "k": k, "rows": m // batch or 1}
    return Problem(words, sizes | {"centred": int(centred), "eps": eps_bits(op.name, eps)})


def _check_modulation(op: str, x: Tensor, rows: Mapping[str, Tensor | None]) -> int:
    """Return how many rows of modulation there are, 1 where there is none."""
    given_ones = {name: t for name, t in rows.items() if t is not None}
    batches = {t.shape[0] for t in given_ones.values()} or {1}
    for name, tensor in given_ones.items():
        expect(op, name, tensor, x.dtype, (tensor.shape[0], x.shape[1]))
        check_device(op, name, tensor, x)
    batch = max(batches)
    if len(batches) > 1 or not batch or x.shape[0] % batch:
        raise ShapeError(
            f"{op}: modulation of {batch} pictures, expected a divisor of {x.shape[0]}"
        )
    return batch


def _outputs(operands: Operands, options: Options) -> tuple[Output, ...]:
    del options
    return ((tuple(given(operands[0]).shape), torch.uint8),)


def _sum_and_codes(operands: Operands, options: Options) -> tuple[Output, ...]:
    x, codes = given(operands[0]), _outputs(operands, options)
    return ((tuple(x.shape), x.dtype), *codes)


def _sample(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    m, n, k = sizes
    dtype = IO_DTYPES[variant.word("QK_IO")]
    x = (torch.randn(m, k, generator=generator) * 2 + 3).to(dtype)
    numbers = torch.randn(2, k, generator=generator).to(dtype).unbind()
    batch = 2 if m % 2 == 0 else 1
    drawn = torch.randn(2, batch, k, generator=generator).to(dtype).unbind()
    modulation = drawn if n % 2 else (None, None)
    operands = (x, *numbers, *modulation, *sample_input(variant, k, generator))
    return operands, (1e-6, n % 3 > 0, variant.word("QK_X_FORMAT"))


def _sample_sum(
    variant: Variant, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Operands, Options]:
    (x, *others), options = _sample(variant, sizes, generator)
    x = given(x)
    added = torch.randn(x.shape, generator=generator).to(x.dtype)
    batch = 2 if len(x) % 2 == 0 else 1
    gate = torch.randn(batch, x.shape[1], generator=generator).to(x.dtype)
    return (x, added, None if sizes[1] % 5 == 0 else gate, *others), options


_EXACT = Budget(0.0, 0.0, (0.0, 0.0), "sums have one order, and every step is rounded once")
_WEIGHT, _BIAS, *_QUANTIZED = INPUT_ARGS
_X, _CODES = Argument("x", "io", "[m, k]"), Argument("q", "u8", "[m, k]", written=True)
_BETWEEN = (
    *(_WEIGHT, _BIAS),
    *(Argument(name, "io", "[m // rows, k]", null="zeros") for name in _MODULATION),
    *_QUANTIZED,
)
_NUMBERS = (M, N, K, *(Argument(name, "i32") for name in ("rows", "centred", "eps")))
_ADDED = (
    Argument("added", "io", "[m, k]"),
    Argument("gate", "io", "[m // rows, k]", null="ones"),
)
_SCHEMA = (
    "Tensor? weight, Tensor? bias, Tensor? modulation_scale, Tensor? modulation_shift, "
    "Tensor? smooth, Tensor scale, float eps, bool centred, str x_format)"
)
_FORMULA = (
    "(clamp(y * smooth[j] * (1 / scale[0]), -max, max)), y = ((x[i, j] - mean_i) / "
    "sqrt(variance_i + eps) * weight[j] + bias[j]) * (1 + modulation_scale[i / rows, j]) "
    "+ modulation_shift[i / rows, j]"
)


def _norm(kind: str) -> Op:
    return Op(
        name=f"layer_norm_codes_{kind}",
        family="layer_norm_codes",
        source="layer_norm_codes.hip",
        formula=f"q[i, j] = {kind}{_FORMULA}",
        schema=f"(Tensor x, {_SCHEMA} -> Tensor",
        axes=(IO, formats("X", kind), SMOOTHING),
        args=(_X, *_BETWEEN, _CODES, *_NUMBERS),
        k_multiple=_ALIGNED,
        check=_check,
        outputs=_outputs,
        reference=layer_norm_codes,
        budget=_EXACT,
        sample=_sample,
    )


def _of_sum(kind: str) -> Op:
    return replace(
        _norm(kind),
        name=f"sum_norm_codes_{kind}",
        family="sum_norm_codes",
        source="sum_norm_codes.hip",
        formula=(
            f"q is layer_norm_codes_{kind} of sum[i, j] = x[i, j] + gate[i / rows, j] * added[i, j]"
        ),
        schema=f"(Tensor x, Tensor added, Tensor? gate, {_SCHEMA} -> (Tensor, Tensor)",
        args=(
            *(_X, *_ADDED, *_BETWEEN, Argument("sum", "io", "[m, k]", written=True)),
            *(_CODES, *_NUMBERS),
        ),
        check=_check_sum,
        outputs=_sum_and_codes,
        reference=sum_norm_codes,
        sample=_sample_sum,
    )


OPS = tuple(of(kind) for of in (_norm, _of_sum) for kind in CODES)
