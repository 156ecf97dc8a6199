"""What attention loses where it multiplies codes of each format, in a running model."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit.device.ops.attention import attention
from quantkit.models.attention import Heads
from quantkit.numerics.attention import attention_codes, codes_of_values, measured_scales
from quantkit.numerics.attention_formats import ATTENTION_FORMATS, AttentionFormat
from quantkit.numerics.attention_scales import AttentionScales

#: Rows of q of every picture and call whose error is measured.
ROWS = 32


def rounded_attention(
    heads: Heads, scale: float | None, found: AttentionFormat, scales: AttentionScales | None
) -> Tensor:
    """Return attention as the kernels compute it.

    Args:
        heads: (B, H, N, D).
        scale: of q k'; None: 1 / sqrt(D).
        found: formats of the codes.
        scales: of the H heads, or of those of all pictures; None: of these very numbers.

    Returns:
        (B, H, N, D) float32.
    """
    return next(_rounded(heads, scale, (found,), scales))


def _rounded(
    heads: Heads,
    scale: float | None,
    formats: tuple[AttentionFormat, ...],
    scales: AttentionScales | None,
) -> Iterator[Tensor]:
    """Yield attention in each of the formats, of which several share codes."""
    _, count, keys, columns = heads.k.shape
    q, k, v = (t.flatten(0, 1).float() for t in heads)
    scales = measured_scales(q, k, v) if scales is None else scales
    by_qk = {
        qk: attention_codes(q, k, v, scale=scale, qk_format=qk, pv=formats[0].pv, scales=scales)
        for qk in dict.fromkeys(row.qk for row in formats)
    }
    values = {formats[0].pv: by_qk[formats[0].qk].v}
    for row in formats:
        if row.pv not in values:
            values[row.pv] = codes_of_values(v, scales, row.pv)
        codes = by_qk[row.qk]
        y = attention(
            codes.q, codes.k, values[row.pv], codes.q_scale, codes.k_scale, codes.v_scale,
            codes.v_mean, keys, count, columns, row.qk, torch.float32, codes.q.shape[2],
        )  # fmt: skip
        yield y.transpose(1, 2)


def lost_power(
    heads: Heads,
    scale: float | None,
    formats: tuple[AttentionFormat, ...],
    scales: AttentionScales | None,
) -> tuple[Tensor, Tensor]:
    """Return what formats change in the outputs of 32 rows of q, evenly spread, in sums of squares.

    Args:
        heads: (B, H, N, D).
        scale: of q k'; None: 1 / sqrt(D).
        formats: F of them.
        scales: static ones; None: of all of these numbers.

    Returns:
        (F, H) of the differences and (H,) of the outputs, float64.
    """
    q, k, v = (t.detach().float() for t in heads)
    if scales is None:
        scales = measured_scales(*(t.flatten(0, 1) for t in (q, k, v)))
    queries, columns = q.shape[2:]
    rows = min(ROWS, queries)
    # Made where it is used: copying it there would wait for the device.
    places = torch.arange(1, 2 * rows, 2, device=q.device) * queries // (2 * rows)
    some = Heads(q[:, :, places], k, v)
    scale = columns**-0.5 if scale is None else scale
    wanted = scaled_dot_product_attention(*some, scale=scale)
    lost = [_power(wanted - y) for y in _rounded(some, scale, formats, scales)]
    return torch.stack(lost), _power(wanted)


class FormatErrors:
    """Sums over the calls of one attention module, of all formats."""

    def __init__(self, heads: int, device: torch.device) -> None:
        """Begin with nothing seen."""
        count = len(ATTENTION_FORMATS)
        self.lost = torch.zeros(count, heads, dtype=torch.float64, device=device)
        self.power = torch.zeros(heads, dtype=torch.float64, device=device)

    def add(self, lost: Tensor, power: Tensor) -> None:
        """Add what ``lost_power`` found of one call, of all formats."""
        self.lost += lost
        self.power += power


def _power(t: Tensor) -> Tensor:
    """Return the sum of squares of each head of (B, H, N, D), float64."""
    return t.square().sum(dim=(0, 2, 3), dtype=torch.float64)
