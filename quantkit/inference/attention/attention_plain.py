"""Attention of a packed UNet in 16 bit by torch, without the division by a factor of one.

diffusers divides the output of each module by a factor that is one in nearly all models: a kernel
that reads and writes all tokens for nothing, 140 times in SDXL's step. Where the factor is one, and
nothing changes the heads between projections and attention, its processor is reimplemented without
the division.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit.inference.attention.attention_call import AttentionSettings, attend
from quantkit.inference.attention.attention_heads import Part, Stream, computed
from quantkit.inference.layers.quantized_input import QuantizedInput
from quantkit.models.attention_modules import AttentionCall, Heads


class PlainAttention(NamedTuple):
    """An attention module of a packed model without norms of heads."""

    module: Any
    #: of codes that are made of each call's heads; None: torch multiplies in 16 bit
    settings: AttentionSettings | None

    def attend_to_itself(self, x: Tensor | QuantizedInput) -> Tensor | None:
        """Return None: projections are not fused."""
        del x
        return None

    def takes(
        self,
        tokens: int,
        like: Tensor | QuantizedInput,
        mask: Tensor | None = None,
        rotary: Any = None,
    ) -> bool:
        """Tell whether a call consists of projections and the attention product only."""
        del tokens, like
        attn = self.module
        between = (attn.norm_q, attn.norm_k, mask, rotary)
        alike = attn.inner_kv_dim == attn.inner_dim and attn.rescale_output_factor == 1
        whole = alike and all(part is None for part in between)
        # torch.compile leaves the division out on its own.
        return whole and not torch.compiler.is_compiling()

    def attend(
        self,
        streams: Sequence[Stream],
        rotary: Any = None,
        mask: Tensor | None = None,
        *,
        reader: Any = None,
    ) -> Tensor | None:
        """Return attention over the tokens of one stream: (B, T, H * D)."""
        del rotary, mask, reader
        (stream,) = streams
        heads = Heads(*(self._heads(part) for part in (stream.q, stream.k, stream.v)))
        y = None if self.settings is None else attend(self.settings, heads, AttentionCall(None, ""))
        y = scaled_dot_product_attention(*heads) if y is None else y
        return y.transpose(1, 2).flatten(2)

    def _heads(self, part: Part) -> Tensor:
        """Return a projection as (B, H, T, D)."""
        x, column = computed(part)
        x = x[..., column : column + self.module.inner_dim]
        return x.view(*x.shape[:2], self.module.heads, -1).transpose(1, 2)
