"""Held-out rows: inputs that the moments were not taken from, nor weights fitted to.

Weights that make up for others are fitted to the moments, and a layer of more columns than the
pictures say apart fits them too well: with 12 prompts of 20 steps the error of the demo's
convolutions of K 2880 was 33 times as large on other prompts. So some prompts are held out, rows of
them are kept as they are, and errors are measured there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: One of so many prompts is held out,
_ONE_OF = 8
#: but at least so many: one picture alone may be an odd one;
_LEAST_HELD = 2
#: and none where the others would be fewer than these.
_LEAST_FITTED = 2

#: Rows of a layer that are kept, about: with guidance twice as many. The error of the error is then
#: a few percent, and what differs between pictures is more.
HELD_ROWS = 512


def held_bytes(k: int) -> int:
    """Return what the rows of a layer of K columns take, with guidance."""
    return 2 * HELD_ROWS * 2 * k


def held_count(prompts: int) -> int:
    """Return how many of so many prompts are held out."""
    held = max(_LEAST_HELD, prompts // _ONE_OF)
    return held if prompts - held >= _LEAST_FITTED else 0


def hold_out(prompts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the prompts that moments are taken from, and the last ones, which are held out."""
    fitted = len(prompts) - held_count(len(prompts))
    return prompts[:fitted], prompts[fitted:]


@dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows that one layer read in the prompts that were held out."""

    #: bfloat16 (R, K)
    rows: Tensor
    #: float32 (R,), of the timesteps that they were read in
    weights: Tensor

    def to(self, device: torch.device) -> "HeldRows":
        """Return them on a device."""
        return HeldRows(self.rows.to(device), self.weights.to(device))

    def smoothed(self, factor: Tensor) -> "HeldRows":
        """Return the rows multiplied by ``factor`` (K,)."""
        return HeldRows((self.rows.float() * factor).to(self.rows.dtype), self.weights)

    def power(self, weight: Tensor, bias: Tensor | None) -> float:
        """Return the mean of |W x + b|^2.

        Args:
            weight: float32 (N, K).
            bias: float32 (N,), or None for 0.
        """
        output = self.rows.float() @ weight.t()
        if bias is not None:
            output += bias
        sums = output.square_().sum(dim=1, dtype=torch.float64)
        return float(sums @ self.weights.double() / self.weights.sum(dtype=torch.float64))
