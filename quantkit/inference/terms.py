"""Inputs as sums of FP8 values: one, or two where one is too coarse.

The second value holds what the first leaves, on a scale that is finer by the first one's mantissa,
so three bits of mantissa become seven. The layer multiplies once for each.
"""

from torch import Tensor

from quantkit.device.ops.quantize import quantize_static, quantize_token
from quantkit.inference.fusing import is_fused
from quantkit.inference.operators import operator_for
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.scales import decode

#: (M, K) uint8 codes of an input, and their float32 scale: (), (1,) or (M,)
Term = tuple[Tensor, Tensor]


def split(  # noqa: PLR0917  the order of the quantize operators
    x: Tensor,
    scale: Tensor | None,
    smooth: Tensor | None,
    shift: Tensor | None,
    fmt: NumberFormat,
    count: int,
) -> list[Term]:
    """Return codes and scales whose products sum to (x - shift) * smooth.

    Args:
        x: (M, K), float16, bfloat16 or float32, contiguous.
        scale: float32, () or (1,), of the first term; None: each row has its own.
        smooth: float32 (K,); None for ones.
        shift: float32 (K,); None for zeros.
        fmt: of the codes.
        count: how many terms.
    """
    terms = [_quantize(x, scale, smooth, shift, fmt)]
    for _ in range(count - 1):
        x = _remainder(x, terms[-1], smooth, shift, fmt)
        smooth = shift = None
        # What rounding leaves is at most half of the last place of the largest code.
        scale = None if scale is None else scale * 2.0 ** -(fmt.mantissa_bits + 1)
        terms.append(_quantize(x, scale, None, None, fmt))
    return terms


def _quantize(
    x: Tensor, scale: Tensor | None, smooth: Tensor | None, shift: Tensor | None, fmt: NumberFormat
) -> Term:
    fused = is_fused(x)
    if scale is not None:
        static = quantize_static if fused else operator_for("quantize_static", fmt.name)
        return static(x, smooth, shift, scale, fmt.name), scale
    per_token = quantize_token if fused else operator_for("quantize_token", fmt.name)
    rows_scale, codes = per_token(x, smooth, shift, fmt.name)
    return codes, rows_scale


def _remainder(
    x: Tensor, term: Term, smooth: Tensor | None, shift: Tensor | None, fmt: NumberFormat
) -> Tensor:
    """Return (x - shift) * smooth less what the codes say, float32."""
    codes, scale = term
    values = x.float() if shift is None else x.float() - shift
    values = values if smooth is None else values * smooth
    return values - decode(codes, fmt.name) * scale.reshape(-1, 1)
