"""The running sums of attention modules, on their device, and what they come to.

As those of layers, sums of a call are added all at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.calibration.statistics.attention_statistics import (
    AttentionStatistics,
    check_attention,
)
from quantkit.calibration.statistics.batch_peaks import largest_of
from quantkit.calibration.statistics.format_errors import FormatErrors, lost_power
from quantkit.calibration.statistics.layer_fields import Field, check_fields
from quantkit.models.attention_modules import Heads
from quantkit.numerics.attention_formats import ATTENTION_FORMATS
from quantkit.numerics.attention_limits import takes_heads

#: A module's sums by name, on the CPU.
AttentionSums = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Attended:
    """What was found of one call of a module; H heads of D columns."""

    #: of q, k and v, each (H, D) in their dtype
    low: list[Tensor]
    high: list[Tensor]
    #: the same, float32
    sums: list[Tensor]
    #: of formats, where their errors are measured: float64 (F, H), and (H,) of what is exact
    errors: tuple[Tensor, ...]
    counts: "Counts"

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return [*self.low, *self.high, *self.sums, *self.errors]


class Counts(NamedTuple):
    """What is counted of a call, or of a bucket: fields of ``AttentionStatistics``."""

    queries: int = 0
    keys: int = 0
    #: the most in a call
    call_queries: int = 0
    call_keys: int = 0

    def plus(self, call: "Counts") -> "Counts":
        """Return the counts with one more call."""
        sums = {name: getattr(self, name) + getattr(call, name) for name in self._fields}
        most = {name: max(getattr(self, name), getattr(call, name)) for name in _MOST}
        return Counts(**sums | most)


#: What is no sum.
_MOST = ("call_queries", "call_keys")


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
        self._counts = [Counts()] * buckets
        self._errors_from = errors_from
        self.errors = FormatErrors(heads, device)
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
            counts=_counts(q, k),
        )

    def count(self, bucket: int, call: Attended) -> None:
        """Count a call that is about to be added."""
        self._counts[bucket] = self._counts[bucket].plus(call.counts)

    def taken(self) -> AttentionSums:
        """Return the sums so far, as ``put`` and ``attention_statistics_of`` take them."""
        low, high = self._low.cpu(), self._high.cpu()
        seen = low <= high
        low, high = (torch.where(seen | t.isnan(), t, 0.0) for t in (low, high))
        return {
            "q_amax": torch.maximum(-low[:, 0], high[:, 0]).amax(dim=2),
            "low": low[:, 1:].contiguous(),
            "high": high[:, 1:].contiguous(),
            "values": self._values.cpu(),
            "counts": torch.tensor(self._counts),
            "format_lost": self.errors.lost.cpu(),
            "format_power": self.errors.power.cpu(),
        }

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from sums that were taken from the same module.

        Raises:
            LookupError, ValueError: they are of another module.
        """
        for name, tensor in self.taken().items():
            found = sums[name]
            if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{name}: {found.dtype} {tuple(found.shape)!s:.80}")
        self._counts = [Counts(*counts) for counts in sums["counts"].tolist()]
        seen = [bucket for bucket, counts in enumerate(self._counts) if counts.queries]
        amax = sums["q_amax"][seen, :, None].to(self._low.device)
        self._low[seen, 0], self._high[seen, 0] = -amax, amax
        self._low[seen, 1:] = sums["low"][seen].to(amax.device)
        self._high[seen, 1:] = sums["high"][seen].to(amax.device)
        self._values.copy_(sums["values"])
        self.errors.lost.copy_(sums["format_lost"])
        self.errors.power.copy_(sums["format_power"])


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
        if call.errors:
            sums.errors.add(*call.errors)
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


#: Of ``AttentionSums``; axes: B buckets, H heads, D columns, P k and v, T q, k and v, C counts, F
#: formats.
SUMS = {
    "q_amax": Field(torch.float32, "BH"),
    "low": Field(torch.float32, "BPHD", signed=True),
    "high": Field(torch.float32, "BPHD", signed=True),
    "values": Field(torch.float64, "BTHD", signed=True),
    "counts": Field(torch.int64, "BC"),
    "format_lost": Field(torch.float64, "FH"),
    "format_power": Field(torch.float64, "H"),
}


def check_attention_sums(where: str, tensors: Mapping[str, Tensor], buckets: int) -> None:
    """Hold the tensors of one module against ``AttentionSums``.

    Raises:
        LookupError, ValueError: a field that is missing or unknown, or of a wrong dtype, shape or
            value.
    """
    heads, columns = tensors["values"].shape[2:]
    sizes = {"B": buckets, "H": heads, "D": columns, "P": 2, "T": 3}
    sizes |= {"C": len(Counts._fields), "F": len(ATTENTION_FORMATS)}
    check_fields(where, tensors, SUMS, sizes)
    statistics = attention_statistics_of(tensors)
    check_attention(where, statistics.tensors(), buckets)


def attention_statistics_of(sums: Mapping[str, Tensor]) -> AttentionStatistics:
    """Return what sums that were taken come to."""
    counts = dict(zip(Counts._fields, sums["counts"].unbind(dim=1), strict=True))
    values, (low, high) = sums["values"], (sums["low"], sums["high"])
    q_mean, k_mean, v_mean = (
        (values[:, i] / counts[of].clamp(min=1).reshape(-1, 1, 1)).float()
        for i, of in enumerate(("queries", "keys", "keys"))
    )
    measured = bool(sums["format_power"].any())
    return AttentionStatistics(
        q_amax=sums["q_amax"],
        k_low=low[:, 0],
        k_high=high[:, 0],
        v_low=low[:, 1],
        v_high=high[:, 1],
        q_mean=q_mean,
        k_mean=k_mean,
        v_mean=v_mean,
        format_lost=sums["format_lost"] if measured else None,
        format_power=sums["format_power"] if measured else None,
        **counts,
    )


def _counts(q: Tensor, k: Tensor) -> Counts:
    pictures, queries, keys = len(q), q.shape[2], k.shape[2]
    return Counts(pictures * queries, pictures * keys, queries, keys)
