"""A call of attention on codes, and the reasons to leave it to torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.device.archs import OneLaunch
from quantkit.device.backends import Backend, forced
from quantkit.device.choosing import choose, why_on_request
from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.ops.table import attention_for
from quantkit.errors import InputError
from quantkit.inference.attention.attention_heads import (
    measured_factors,
    product_of_streams,
    stream_of,
)
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.numerics.attention_factors import padded, score_factor
from quantkit.numerics.attention_formats import PV_FORMATS, QK_FORMATS
from quantkit.numerics.attention_limits import takes_heads
from quantkit.numerics.formats import E4M3FN


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of attention on codes."""

    #: of queries and keys: e4m3fn or int8
    qk_format: str = E4M3FN.name
    #: with fewer keys torch's attention is used: making codes would cost more than they save
    min_keys: int = 512
    #: of probabilities and values: e4m3fn; None: float16
    pv: str | None = E4M3FN.name

    def __post_init__(self) -> None:
        """Refuse what no kernel takes.

        Raises:
            InputError: a format, or a number of keys.
        """
        if self.qk_format not in QK_FORMATS:
            expected = ", ".join(QK_FORMATS)
            raise InputError(f"attention: qk {self.qk_format!r:.40}, expected one of {expected}")
        if self.pv not in PV_FORMATS:
            expected = f"{E4M3FN.name}, or None for 16 bit"
            raise InputError(f"attention: pv {self.pv!r:.40}, expected {expected}")
        if self.min_keys < 1:
            raise InputError(f"attention: min_keys {self.min_keys}, expected 1 or more")


def attend(settings: AttentionSettings, heads: Heads, call: AttentionCall) -> Tensor | None:
    """Return attention with dynamic scales; None where torch computes it.

    Returns:
        (B, H, M, D).
    """
    if call.more or why_not(settings, heads):
        return None
    tau = score_factor(heads.q.shape[3], call.scale)
    if tau <= 0:
        return None
    stream, shape = stream_of(heads)
    factors = measured_factors(stream, shape, settings.qk_format, tau)
    product = product_of_streams([stream], shape, factors, settings.qk_format, pv=settings.pv)
    return product.of_pictures(heads.q.shape[1]).wide().transpose(1, 2)


def why_not(settings: AttentionSettings, heads: Heads) -> str:
    """Return why torch computes attention of these heads; empty when it is quantized."""
    q, k, v = heads
    keys, columns = k.shape[2:]
    if k.shape[1] != q.shape[1]:
        return "heads share keys"
    if v.shape[3] != columns:
        return "values have other heads"
    if torch.is_grad_enabled() and any(t.requires_grad for t in heads):
        return "gradients are enabled"
    return why_not_sizes(settings, keys, columns, q)


def why_not_sizes(
    settings: AttentionSettings,
    keys: int,
    columns: int,
    like: Tensor,
    launch: OneLaunch | None = None,
) -> str:
    """Return why torch computes attention of these sizes; empty when it is quantized.

    Args:
        settings: of the module.
        keys: how many.
        columns: of a head.
        like: of the dtype and on the device of queries.
        launch: what makes all codes; None: several launches.
    """
    if keys < settings.min_keys:
        return f"{keys} keys, fewer than min_keys"
    if not takes_heads(columns):
        return f"heads of {columns} columns"
    if like.dtype not in IO_DTYPES.values():
        return f"{like.dtype} is not computed"
    op = attention_for(settings.qk_format, settings.pv)
    name = None if launch is None else launch.value
    reason: str = _why_no_kernel(op, str(like.device), (columns, keys), name)
    return reason


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_no_kernel(op: str, device: str, sizes: tuple[int, int], launch: str | None) -> str:
    made = None if launch is None else (OneLaunch(launch), *sizes)
    choice = choose(op, torch.device(device), k=padded(sizes[0]))
    if forced() is not None:
        return ""
    # Unasked, the reference would be slower than torch's attention, and no nearer.
    no_kernel = choice.backend is Backend.REFERENCE
    reason: str = choice.reason if no_kernel else why_on_request(op, torch.device(device), made)
    return reason
