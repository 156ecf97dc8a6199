"""The plan of a weight, and the results of encoding it besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quantkit.checkpoint.metadata import LayerRecord
    from quantkit.models.source import StoredBlocks
    from quantkit.numerics.scheme import Scheme
    from quantkit.packing.gptq import Rounder

#: (rows (R, K) float32 as in the source, index of the first) -> bool (R, K), True where kept
MaskSource: TypeAlias = "Callable[[Tensor, int], Tensor]"


@dataclass(frozen=True)
class WeightPlan:
    """The plan of a layer before its weight is read."""

    layer: str
    scheme: Scheme
    #: a rule of ``WEIGHT_SCALES``
    observer: str
    #: None: dense
    mask: MaskSource | None = None
    #: amax of each column |w| (K,) -> factor (C,) by which inputs are multiplied
    smooth: Callable[[Tensor], Tensor] | None = None
    #: factor or None -> static scale, [] or [buckets]
    input_scale: Callable[[Tensor | None], Tensor] | None = None
    #: E[x] of each column (K,), when the bias is to be corrected
    mean: Tensor | None = None
    #: None: every weight becomes its nearest code, and dropped ones are not made up for
    rounder: Rounder | None = None
    #: float32 [], of the whole weight, when others share it; None: its own is chosen
    scale: Tensor | None = None
    #: the blocks that the weight was dequantized from, to be packed without a second rounding
    blocks: StoredBlocks | None = None


@dataclass(frozen=True, eq=False)
class Encoded:
    """The results of encoding one weight besides its tensors."""

    #: the dense shape and the SHA-256 of the source weight
    record: LayerRecord
    #: (N,) float32, the change of the mean output: (W - W_packed) E[x]; None: not asked for
    correction: Tensor | None
