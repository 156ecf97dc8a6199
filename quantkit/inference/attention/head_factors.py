"""A cache of the factors that quantize heads, for modules with static scales.

Computing them in every call would take some ten small kernels before attention.
"""

from typing import Any

import torch

from quantkit.checkpoint.packed_attention import CHILD
from quantkit.device.torch_operators import is_plain_call
from quantkit.numerics.attention_factors import HeadFactors, head_factors
from quantkit.numerics.attention_scales import SHAPES, AttentionScales
from quantkit.pipelines.versions import Version, same_versions, version_of

#: Where the child with the scales keeps them.
_KEPT = "quantkit_factors"
#: And those of a model without numbers, which change no more than they are there.
_FIXED = "quantkit_fixed_factors"


class FactorCache:
    """Factors cached with the scales that they follow from; a copy of the module starts empty."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[tuple[Version, ...], HeadFactors]] = {}

    def find(self, scales: AttentionScales, qk_format: str) -> HeadFactors:
        """Return the factors of scales, computed or cached."""
        tensors = [getattr(scales, name) for name in SHAPES]
        entry = self._entries.get(qk_format)
        if entry is not None and same_versions(entry[0], tensors):
            return entry[1]
        made = head_factors(scales, scales.head_size, qk_format)
        # What is made while a graph is captured is there when it has been replayed.
        captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and not any(t.is_inference() for t in tensors):
            self._entries[qk_format] = (tuple(map(version_of, tensors)), made)
        return made

    def __deepcopy__(self, memo: object) -> "FactorCache":
        return FactorCache()

    def __reduce__(self) -> tuple[type["FactorCache"], tuple[()]]:
        return FactorCache, ()


def fix_factors(module: Any, scales: AttentionScales, qk_format: str) -> None:
    """Make the factors of a module whose scales are fake, for all steps that are traced."""
    made = head_factors(scales, scales.head_size, qk_format)
    vars(getattr(module, CHILD)).setdefault(_FIXED, {})[qk_format] = made


def factors_of(module: Any, scales: AttentionScales, qk_format: str) -> HeadFactors:
    """Return the factors that quantize a module's heads; made anew where a call is traced.

    Args:
        module: of attention, with ``scales``.
        scales: static ones.
        qk_format: of queries and keys.
    """
    child = getattr(module, CHILD)
    if torch.compiler.is_compiling():
        return head_factors(scales, scales.head_size, qk_format)
    if not is_plain_call(scales.key_mean):
        fixed: dict[str, HeadFactors] = vars(child).get(_FIXED, {})
        return fixed.get(qk_format) or head_factors(scales, scales.head_size, qk_format)
    kept: FactorCache = vars(child).setdefault(_KEPT, FactorCache())
    return kept.find(scales, qk_format)
