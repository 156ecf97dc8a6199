"""What attention loses where fewer columns of queries and keys are multiplied, in a running model.

The columns are those that the model has: of a model that ``rotate`` wrote, the first hold most.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit.calibration.attention_accumulators import ROWS
from quantkit.models.attention import Heads
from quantkit.numerics.attention_basis import largest_two_of_four, ranks_of


class ColumnErrors:
    """Sums over the calls of one attention module."""

    def __init__(self, heads: int, columns: int, device: torch.device) -> None:
        """Begin with nothing seen."""
        self._ranks = ranks_of(columns)
        self._sparse = columns % 4 == 0
        count = len(self._ranks) + self._sparse
        self._lost = torch.zeros(count, heads, dtype=torch.float64, device=device)
        self._power = torch.zeros(heads, dtype=torch.float64, device=device)

    def add(self, heads: Heads, scale: float | None) -> None:
        """Add one call, on 32 rows of q, evenly spread.

        Args:
            heads: (B, H, N, D).
            scale: of q k'; None: 1 / sqrt(D).
        """
        q, k, v = (t.detach().float() for t in heads)
        queries, columns = q.shape[2:]
        rows = min(ROWS, queries)
        places = torch.arange(1, 2 * rows, 2, device=q.device) * queries // (2 * rows)
        q = q[:, :, places]
        # Given to all, because it is that of all columns.
        scale = columns**-0.5 if scale is None else scale
        wanted = scaled_dot_product_attention(q, k, v, scale=scale)
        self._power += _power(wanted)
        keys = [k[..., :rank] for rank in self._ranks]
        if self._sparse:
            keys.append(largest_two_of_four(k - k.mean(dim=2, keepdim=True)))
        for index, fewer in enumerate(keys):
            found = scaled_dot_product_attention(q[..., : fewer.shape[3]], fewer, v, scale=scale)
            self._lost[index] += _power(wanted - found)

    def taken(self, prompts: int) -> dict[str, Tensor]:
        """Return the fields of ``AttentionStatistics``.

        Args:
            prompts: how many were drawn.
        """
        count, lost = len(self._ranks), self._lost.cpu()
        return {
            "ranks": torch.tensor(self._ranks, dtype=torch.int64),
            "rank_lost": lost[:count],
            "sparse_lost": lost[count:],
            "power": self._power.cpu(),
            "held_out": torch.tensor([prompts]),
        }


def _power(t: Tensor) -> Tensor:
    """Return the sum of squares of each head of (B, H, N, D), float64."""
    return t.square().sum(dim=(0, 2, 3), dtype=torch.float64)


def relative(lost: Tensor, power: Tensor) -> Tensor:
    """Return relative errors (rms) of sums of squares; 0 where there is nothing to lose."""
    return torch.where(power > 0, lost / power, torch.zeros_like(lost)).sqrt()


def errors_of_module(lost: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of a module's output by treatment, as ``rank 32`` and ``2:4``.

    Args:
        lost: the fields of ``taken``.
    """
    power = lost["power"].sum()
    by_name = {
        f"rank {rank}": row
        for rank, row in zip(lost["ranks"].tolist(), lost["rank_lost"], strict=True)
    }
    if len(lost["sparse_lost"]):
        by_name["2:4"] = lost["sparse_lost"][0]
    return {name: float(relative(row.sum(), power)) for name, row in by_name.items()}
