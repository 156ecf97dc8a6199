"""Static scales of attention: ranges of queries, keys and values by head, from calibration."""

from dataclasses import dataclass, fields

from torch import Tensor

from quantkit.numerics.attention_limits import MARGIN
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.scales import scale_of_amax


@dataclass(frozen=True, eq=False)
class AttentionScales:
    """Static scales for queries, keys and values of H heads of D columns; float32."""

    #: (H,), positive: |q| that codes reach
    query_range: Tensor
    #: (H,), positive: |k - key_mean| that codes reach
    key_range: Tensor
    #: (H, D), taken off keys, which softmax does not see
    key_mean: Tensor
    #: (H, D), positive: of e4m3fn codes of v - value_mean
    value_scale: Tensor
    #: (H, D), taken off values and added to the result
    value_mean: Tensor

    @property
    def heads(self) -> int:
        """H."""
        return self.key_mean.shape[0]

    @property
    def head_size(self) -> int:
        """D."""
        return self.key_mean.shape[1]


#: The names of the tensors, and whether they are (H, D) or (H,).
SHAPES = {
    field.name: field.name in {"key_mean", "value_scale", "value_mean"}
    for field in fields(AttentionScales)
}
#: Those that have to be positive.
POSITIVE = ("query_range", "key_range", "value_scale")


def scales_of_ranges(
    *, q: Tensor, k: Tensor, k_mean: Tensor, v: Tensor, v_mean: Tensor, margin: float = MARGIN
) -> AttentionScales:
    """Return the scales of observed ranges; for a range of zero, 1, whose codes are zero too.

    Args:
        q: (H,) largest |q|.
        k: (H,) largest |k - k_mean|.
        k_mean: (H, D).
        v: (H, D) largest |v - v_mean| of each column.
        v_mean: (H, D).
        margin: what ranges are multiplied by, 1 or more.
    """
    value_scale = scale_of_amax(v.float() * margin, E4M3FN)
    q, k = (_positive(t.float() * margin) for t in (q, k))
    return AttentionScales(q, k, k_mean.float(), value_scale, v_mean.float())


def _positive(t: Tensor) -> Tensor:
    return t.where(t > 0, t.new_ones(()))
