"""Running sums of attention modules, on their device.

As those of layers, sums of a call are added all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.statistics.batch_peaks import largest_of
from quantkit.calibration.statistics.fields import Tensors, put, refuse_other_shapes, take
from quantkit.calibration.statistics.format_errors import lost_power
from quantkit.models.attention_modules import Heads
from quantkit.numerics.attention_formats import ATTENTION_FORMATS
from quantkit.numerics.attention_limits import takes_heads


@dataclass(frozen=True, eq=False)
class Attended:
    """Findings of one call of a module; H heads of D columns."""

    #: of q, k and v, each (H, D) in their dtype
    low: list[Tensor]
    high: list[Tensor]
    #: the same, float32
    sums: list[Tensor]
    #: of formats, where their errors are measured: float64 (F, H), and (H,) of what is exact
    errors: tuple[Tensor, ...]
    pictures: int
    #: of each picture
    queries: int
    keys: int

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return [*self.low, *self.high, *self.sums, *self.errors]


class AttentionAccumulators:
    """The accumulators of one module over all timestep buckets."""

    def __init__(
        self,
        heads: int,
        columns: int,
        buckets: int,
        device: torch.device,
        *,
        errors_from: int | None = None,
    ) -> None:
        """Begin with nothing seen.

        Args:
            heads: how many.
            columns: of each.
            buckets: how many.
            device: of q, k and v.
            errors_from: measure the errors of formats in calls with so many keys; None: in none.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        #: of q, k and v, beyond all numbers where nothing was seen
        self._low = zeros(buckets, 3, heads, columns, dtype=torch.float32).fill_(torch.inf)
        self._high = -self._low
        self._values = zeros(buckets, 3, heads, columns)
        names = ("queries", "keys", "call_queries", "call_keys")
        self._counts = {name: [0] * buckets for name in names}
        self._errors_from = errors_from
        #: of formats, and what they are relative to
        self.lost, self.power = zeros(len(ATTENTION_FORMATS), heads), zeros(heads)
        parts = (self._low, self._high, self._values)
        self.parts = [ModuleSums(*views) for views in zip(*parts, strict=True)]

    def look(self, heads: Heads, scale: float | None) -> Attended:
        """Return what is to be added of one call, without waiting for the device.

        Args:
            heads: what it multiplies, (B, H, N, D).
            scale: of q k'; None: 1 / sqrt(D).
        """
        q, k, v = (t.detach() for t in heads)
        least = self._errors_from
        measured = least is not None and k.shape[2] >= least and takes_heads(k.shape[3])
        return Attended(
            low=[t.amin(dim=(0, 2)) for t in (q, k, v)],
            high=[t.amax(dim=(0, 2)) for t in (q, k, v)],
            sums=[t.sum(dim=(0, 2), dtype=torch.float32) for t in (q, k, v)],
            errors=lost_power(heads, scale, ATTENTION_FORMATS, None) if measured else (),
            pictures=len(q),
            queries=q.shape[2],
            keys=k.shape[2],
        )

    def count(self, bucket: int, call: Attended) -> None:
        """Count a call that is about to be added."""
        for name, rows in (("queries", call.queries), ("keys", call.keys)):
            total, most = self._counts[name], self._counts[f"call_{name}"]
            total[bucket] += call.pictures * rows
            most[bucket] = max(most[bucket], rows)
        if call.errors:
            lost, power = call.errors
            self.lost += lost
            self.power += power

    def taken(self) -> dict[str, Tensor]:
        """Return the sums so far by field, on the CPU; of formats, where any was measured."""
        low, high = self._low.cpu(), self._high.cpu()
        seen = low <= high
        low, high = (torch.where(seen | t.isnan(), t, 0.0) for t in (low, high))
        stored = {
            "q_amax": torch.maximum(-low[:, 0], high[:, 0]).amax(dim=2),
            **{f"{what}_low": low[:, i] for i, what in _KV},
            **{f"{what}_high": high[:, i] for i, what in _KV},
            **{f"{what}_mean": self._values[:, i] for i, what in enumerate("qkv")},
        }
        if bool(self.power.any()):
            stored |= {"format_lost": self.lost, "format_power": self.power}
        return take(stored, self._counts)

    def put(self, sums: Tensors) -> None:
        """Go on from sums that were taken from the same module.

        Raises:
            ValueError: they are of another module.
        """
        refuse_other_shapes(sums, self.taken())
        means = {f"{what}_mean": self._values[:, i] for i, what in enumerate("qkv")}
        put(sums, means, self._counts)
        seen = sums["queries"] > 0
        device = self._low.device
        ends = {i: (sums[f"{what}_low"], sums[f"{what}_high"]) for i, what in _KV}
        ends[0] = (-sums["q_amax"].unsqueeze(2), sums["q_amax"].unsqueeze(2))
        for i, (low, high) in ends.items():
            self._low[seen.to(device), i] = low[seen].to(device)
            self._high[seen.to(device), i] = high[seen].to(device)
        if "format_lost" in sums:
            self.lost.copy_(sums["format_lost"])
            self.power.copy_(sums["format_power"])


#: Where k and v stand among q, k and v.
_KV = ((1, "k"), (2, "v"))


@dataclass(frozen=True, eq=False)
class ModuleSums:
    """Views of one bucket's sums."""

    #: float32 (3, H, D)
    low: Tensor
    high: Tensor
    #: float64 (3, H, D)
    values: Tensor


def add_attended(bucket: int, calls: Sequence[tuple[AttentionAccumulators, Attended]]) -> Tensor:
    """Add calls of different modules, without waiting for the device.

    Returns:
        bool (n,): of a call, whether all that it multiplied is finite.
    """
    for sums, call in calls:
        sums.count(bucket, call)
    mine, found = [sums.parts[bucket] for sums, _ in calls], [call for _, call in calls]
    shapes = [sums.low.shape for sums in mine]
    low = _joined([call.low for call in found], shapes, torch.float32)
    high = _joined([call.high for call in found], shapes, torch.float32)
    values = _joined([call.sums for call in found], shapes, torch.float64)
    torch._foreach_minimum_([sums.low for sums in mine], low)
    torch._foreach_maximum_([sums.high for sums in mine], high)
    torch._foreach_add_([sums.values for sums in mine], values)
    finite = [largest_of(parts).isfinite() for parts in (low, high)]
    return torch.stack(finite).all(dim=0)


def _joined(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[torch.Size], dtype: torch.dtype
) -> list[Tensor]:
    """Return the parts of each call as one tensor of a shape, converted all at once."""
    flat = torch.cat([part.reshape(-1) for call in parts for part in call]).to(dtype)
    pieces = torch.split(flat, [shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
