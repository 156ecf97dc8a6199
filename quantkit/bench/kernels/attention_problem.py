"""The operands of one attention, in 16 bit and as codes, and the exact results in float64."""

from functools import cached_property
from math import e, log2, sqrt

import torch
from torch import Tensor

from quantkit.bench.kernels.kernel_shapes import AttentionShape
from quantkit.numerics.attention_factors import (
    KEYS,
    AttentionCodes,
    attention_codes,
    measured_scales,
)
from quantkit.numerics.attention_scales import AttentionScales
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.scales import decode

#: Scores that are in memory in float64 at once: 256 MB of them.
_SCORES = 2**25


class AttentionProblem:
    """Random heads of one shape; what is asked for first is made then.

    Normal numbers. Every column of keys and values has a mean of its own, as those of trained
    models have: a mistake in the mean of the values, or in what a row of probabilities sums to, is
    as large as the result.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, seed: int = 0) -> None:
        """Remember the shape; nothing is allocated yet."""
        self.shape = shape
        self.device = device
        self._seed = seed

    @cached_property
    def q(self) -> Tensor:
        """(B, H, Q, D) float16; in memory, as those of k and v, heads lie beside each other."""
        return self._normal(1, self.shape.queries).half()

    @cached_property
    def k(self) -> Tensor:
        """(B, H, K, D) float16."""
        return (self._normal(2, self.shape.keys) + self._normal(3, 1)).half()

    @cached_property
    def v(self) -> Tensor:
        """(B, H, K, D) float16."""
        return (self._normal(4, self.shape.keys) + self._normal(5, 1)).half()

    @cached_property
    def scales(self) -> AttentionScales:
        """Of these very numbers, of all (B * H) heads."""
        return measured_scales(*self._rows())

    @cached_property
    def codes_fp8(self) -> AttentionCodes:
        """Queries and keys in e4m3fn."""
        return self.make_codes(E4M3FN.name)

    @cached_property
    def codes_int8(self) -> AttentionCodes:
        """Queries and keys in int8."""
        return self.make_codes(INT8.name)

    @cached_property
    def exact(self) -> Tensor:
        """(B, H, Q, D) float64: attention of the 16-bit operands."""
        scale = log2(e) / sqrt(self.shape.head_size)
        return self._attend(self.q.double() * scale, self.k.double(), self.v.double())

    @cached_property
    def exact_fp8(self) -> Tensor:
        """(B, H, Q, D) float64: of the codes, probabilities not rounded."""
        return self._of_codes(self.codes_fp8)

    @cached_property
    def exact_int8(self) -> Tensor:
        """(B, H, Q, D) float64: of the codes, probabilities not rounded."""
        return self._of_codes(self.codes_int8)

    def make_codes(self, qk_format: str) -> AttentionCodes:
        """Return the reference's codes of (B * H) heads."""
        return attention_codes(*self._rows(), qk_format=qk_format, scales=self.scales)

    def forget_exact(self) -> None:
        """Free the float64 results."""
        for name in [name for name in self.__dict__ if name.startswith("exact")]:
            del self.__dict__[name]

    def _normal(self, seed: int, count: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(8 * self._seed + seed)
        size = (self.shape.batch, count, self.shape.heads, self.shape.head_size)
        return torch.randn(size, generator=generator, device=self.device).transpose(1, 2)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the operands as (B * H, N, D)."""
        return self.q.flatten(0, 1), self.k.flatten(0, 1), self.v.flatten(0, 1)

    def _of_codes(self, codes: AttentionCodes) -> Tensor:
        q, k = (decode(t, codes.qk_format, torch.float64) for t in (codes.q, codes.k))
        if codes.q_scale is not None and codes.k_scale is not None:
            by_key = codes.k_scale.repeat_interleave(KEYS, dim=1)[:, : self.shape.keys]
            q, k = (t * s.double().unsqueeze(2) for t, s in ((q, codes.q_scale), (k, by_key)))
        v = decode(codes.v, E4M3FN.name, torch.float64)[:, :, : self.shape.keys]
        v = v * codes.v_scale.double().unsqueeze(2) + codes.v_mean.double().unsqueeze(2)
        leading = (self.shape.batch, self.shape.heads)
        heads = (t.reshape(*leading, *t.shape[1:]) for t in (q, k, v.transpose(1, 2)))
        return self._attend(*heads)[..., : self.shape.head_size]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention whose scores are in powers of two, some rows at a time."""
        rows = max(1, _SCORES // self.shape.keys)
        y = torch.empty_like(q)
        for picture in range(self.shape.batch):
            for head in range(self.shape.heads):
                keys, values, out = (t[picture, head] for t in (k, v, y))
                for start in range(0, self.shape.queries, rows):
                    part = slice(start, start + rows)
                    scores = q[picture, head, part] @ keys.T
                    scores -= scores.amax(dim=1, keepdim=True)
                    p = scores.exp2_()
                    out[part] = (p @ values) / p.sum(dim=1, keepdim=True)
        return y
