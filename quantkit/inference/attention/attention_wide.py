"""Attention in 16 bit: one fused kernel prepares the heads, torch multiplies them.

Between projections and attention are norms of the heads, rotary embeddings and a concatenation of
two streams: some ten kernels for each tensor where torch runs them one by one. On a GPU one
operation does it. Where torch.compile fuses them itself, where gradients are enabled or a norm has
hooks, diffusers' own code runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from quantkit.device.ops.checks import IO_DTYPES
from quantkit.device.torch_operators import OPERATORS
from quantkit.inference.attention.attention_call import AttentionSettings, attend
from quantkit.inference.attention.attention_heads import Projection, Stream, computed
from quantkit.inference.layers.fused_op import has_kernel
from quantkit.inference.layers.modules import is_watched
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.models.attention_modules import AttentionCall, Heads
from quantkit.numerics.attention_limits import takes_heads

#: What attention modules call the norms of their heads.
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
_OP = "joint_heads"
_NOWHERE = Projection(torch.empty(0))


class WideAttention(NamedTuple):
    """An attention module of a packed model, and its processor."""

    module: Any
    processor: Any
    #: of codes that are made of each call's heads; None: torch multiplies in 16 bit
    settings: AttentionSettings | None

    def takes(
        self,
        tokens: int,
        like: Tensor | QuantizedInput,
        mask: Tensor | None = None,
        rotary: Any = None,
    ) -> bool:
        """Tell whether one operation makes the heads."""
        del mask
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        if getattr(self.processor, "_parallel_config", None) is not None:
            return False
        size = self._head_size
        known = takes_heads(size) and like.dtype in IO_DTYPES.values()
        if not known or not has_kernel(_OP, str(like.device), size):
            return False
        norms = [getattr(self.module, name, None) for name in NORMS]
        return _are_known(norms, size, like) and _is_known(rotary, (tokens, size))

    def attend(
        self,
        streams: Sequence[Stream],
        rotary: Any = None,
        mask: Tensor | None = None,
        *,
        reader: Any = None,
    ) -> Tensor | None:
        """Return attention over the tokens of all streams, one after another: (B, T, H * D).

        None where no pass is saved. Whatever reads it gets 16 bit.
        """
        del reader
        if len(streams) == 1 and rotary is None and streams[0].norm_q is streams[0].norm_k is None:
            return None
        q, k, v = self._heads(streams, rotary)
        y = None
        if self.settings is not None and mask is None:
            heads = Heads(*(t.transpose(1, 2) for t in (q, k, v)))
            y = attend(self.settings, heads, AttentionCall(None, ""))
        return (self._multiplied(q, k, v, mask) if y is None else y.transpose(1, 2)).flatten(2)

    @property
    def _head_size(self) -> int:
        size: int = self.module.inner_dim // self.module.heads
        return size

    def _heads(self, streams: Sequence[Stream], rotary: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, T, H, D) each."""
        made = [[computed(part) for part in (s.q, s.k, s.v)] for s in streams]
        first, second = made[0], made[1] if len(made) > 1 else None
        norms: list[Any] = [norm for s in streams for norm in (s.norm_q, s.norm_k)]
        weights = [None if norm is None else norm.weight for norm in norms]
        shape = (self.module.heads, self._head_size)
        turn = (None, None)
        if rotary is not None:
            turn = tuple(t.to(first[0].x.device).float() for t in rotary)
        columns = [part.column for part in first] + [p.column for p in second or [_NOWHERE] * 3]
        heads: Tensor = OPERATORS[_OP](
            first[0].x, first[1].x, None if second is None else first[2].x,
            *((None,) * 3 if second is None else (part.x for part in second)),
            *weights, *(None,) * (4 - len(weights)), *turn,
            columns, *shape, max([0.0, *(norm.eps for norm in norms if norm is not None)]),
            "none" if rotary is None else "pairs",
        )  # fmt: skip
        if second is not None:
            return heads[0], heads[1], heads[2]
        x, column = first[2]
        # Of one stream values are where attention reads them.
        x = x[..., column : column + shape[0] * shape[1]]
        return heads[0], heads[1], x.reshape(*x.shape[:2], *shape)

    def _multiplied(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention as the processor computes it, (B, T, H, D)."""
        if hasattr(self.processor, "_attention_backend"):
            backend = self.processor._attention_backend  # noqa: SLF001  diffusers has no other name
            y: Tensor = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
            return y
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _are_known(norms: Sequence[Any], size: int, like: Tensor | QuantizedInput) -> bool:
    """Tell whether all norms are equal RMS norms of heads without hooks."""
    found = [norm for norm in norms if norm is not None]
    return len({getattr(norm, "eps", None) for norm in found}) <= 1 and all(
        _is_rms(norm, size, like) for norm in found
    )


def _is_rms(norm: Any, size: int, like: Tensor | QuantizedInput) -> bool:
    if type(norm) not in {RMSNorm, nn.RMSNorm} or getattr(norm, "bias", None) is not None:
        return False
    weight = norm.weight
    if weight is None or norm.eps is None or is_watched(norm):
        return False
    same: bool = weight.dtype is like.dtype and weight.device == like.device
    return same and weight.shape == (size,)


def _is_known(rotary: Any, shape: tuple[int, int]) -> bool:
    """Tell whether a rotation is cosines and sines of each token and column."""
    return rotary is None or (len(rotary) == 2 and all(t.shape == shape for t in rotary))
