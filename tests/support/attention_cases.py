"""Heads, codes and calls of the attention operations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.device.ops.table import OPS, attention_for
from quantkit.numerics.attention_factors import AttentionCodes, attention_codes

#: queries, keys: one of each, tails of every tile, whole ones, cross attention
SIZES = ((1, 1), (37, 101), (5, 77), (33, 64), (130, 65), (16, 32), (257, 128))


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of all heads of all pictures, float32 (N, rows, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int

    @classmethod
    def draw(cls, sizes, columns, *, pictures=1, heads=2, offset=1.0, seed=0):
        """Return normal numbers; keys and values have a mean of their own in every column."""
        generator = torch.Generator().manual_seed(seed)
        m, n = sizes

        def normal(rows):
            return torch.randn(pictures * heads, rows, columns, generator=generator)

        return cls(1.5 * normal(m), normal(n) + offset * normal(1), normal(n) + offset, heads)

    def codes(self, fmt, pv="e4m3fn") -> AttentionCodes:
        return attention_codes(self.q, self.k, self.v, qk_format=fmt, pv=pv)

    def exact(self):
        """Return torch's own attention in float64, (pictures, M, heads, D)."""
        y = torch.nn.functional.scaled_dot_product_attention(
            self.q.double(), self.k.double(), self.v.double()
        )
        return y.unflatten(0, (-1, self.heads)).transpose(1, 2)

    def call(self, fmt, codes=None, *, dtype=torch.float16, pv="e4m3fn"):
        """Return the operation and the arguments of its call."""
        c = codes or self.codes(fmt, pv)
        operands = (c.q, c.k, c.v, c.q_scale, c.k_scale, c.v_scale, c.v_mean)
        keys, columns = self.k.shape[1:]
        options = (keys, self.heads, columns, fmt, dtype)
        return OPS[attention_for(fmt, pv)], (*operands, *options)
