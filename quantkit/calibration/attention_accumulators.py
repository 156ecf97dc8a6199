"""The running sums of attention modules, on their device, and what they come to.

As those of layers, sums of a call are added all at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.calibration.attention_statistics import AttentionStatistics, check_attention
from quantkit.calibration.batch_peaks import largest_of
from quantkit.calibration.format_errors import FormatErrors, lost_power
from quantkit.calibration.layer_fields import Field, check_fields
from quantkit.models.attention import Heads
from quantkit.numerics.attention_formats import ATTENTION_FORMATS
from quantkit.numerics.attention_limits import takes_heads

#: A module's sums by name, on the CPU.
AttentionSums = dict[str, Tensor]

#: Rows of q of every picture and call whose probabilities are computed; all would cost what
#: attention does.
ROWS = 32
#: A key is near a query that is at most so small a part of all keys away, on either side: about a
#: tenth of them.
_NEAR = 20


@dataclass(frozen=True, eq=False)
class Attended:
    """What was found of one call of a module; H heads of D columns."""

    #: of q, k and v, each (H, D) in their dtype
    low: list[Tensor]
    high: list[Tensor]
    #: the same, float32
    sums: list[Tensor]
    #: float64 (2, H), over sampled rows, of entropy and locality
    shares: Tensor
    #: float64 (H, D, D), of q and k: sums of x x'; none where no use is made of them
    second: list[Tensor]
    #: of formats, where their errors are measured: float64 (F, H), and (H,) of what is exact
    errors: tuple[Tensor, ...]
    counts: "Counts"

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return [*self.low, *self.high, *self.sums, self.shares, *self.second, *self.errors]


class Counts(NamedTuple):
    """What is counted of a call, or of a bucket: fields of ``AttentionStatistics``."""

    queries: int = 0
    keys: int = 0
    #: the most in a call
    call_queries: int = 0
    call_keys: int = 0
    #: sampled rows, and those of which locality is measured
    rows: int = 0
    local_rows: int = 0

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
        bare: bool,
        errors_from: int | None = None,
    ) -> None:
        """Begin with nothing seen.

        Args:
            heads: how many.
            columns: of each.
            buckets: how many.
            device: of q, k and v.
            bare: q and k come straight from their projections, so second moments are of use.
            errors_from: measure the errors of formats in calls with so many keys; None: in none.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        #: of q, k and v, beyond all numbers where nothing was seen
        self._low = zeros(buckets, 3, heads, columns, dtype=torch.float32).fill_(torch.inf)
        self._high = -self._low
        self._values = zeros(buckets, 3, heads, columns)
        #: of entropies and localities
        self._shares = zeros(buckets, 2, heads)
        self._counts = [Counts()] * buckets
        #: of q and k
        self._second = zeros(2 if bare else 0, heads, columns, columns)
        self._errors_from = errors_from
        self.errors = FormatErrors(heads, device)
        parts = (self._low, self._high, self._values, self._shares)
        self.parts = [ModuleSums(*views) for views in zip(*parts, strict=True)]
        self.second = list(self._second)

    def look(self, heads: Heads, scale: float | None, *, cross: bool) -> Attended:
        """Return what is to be added of one call, without waiting for the device.

        Args:
            heads: what it multiplies, (B, H, N, D).
            scale: of q k'; None: 1 / sqrt(D).
            cross: keys are not the queries' own sequence.
        """
        q, k, v = (t.detach() for t in heads)
        wide = [_rows_together(t) for t in (q, k)]
        shares, rows = _shares(wide[0], wide[1], scale, cross=cross)
        least = self._errors_from
        measured = least is not None and k.shape[2] >= least and takes_heads(k.shape[3])
        return Attended(
            low=[t.amin(dim=(0, 2)) for t in (q, k, v)],
            high=[t.amax(dim=(0, 2)) for t in (q, k, v)],
            sums=[t.sum(dim=(0, 2), dtype=torch.float32) for t in (q, k, v)],
            shares=shares,
            second=[_second(t) for t in wide] if self.second else [],
            errors=lost_power(heads, scale, ATTENTION_FORMATS, None) if measured else (),
            counts=_counts(q, k, rows, cross=cross),
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
            "shares": self._shares.cpu(),
            "counts": torch.tensor(self._counts),
            "second": self._second.cpu(),
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
        self._shares.copy_(sums["shares"])
        self._second.copy_(sums["second"])
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
    #: float64 (2, H)
    shares: Tensor


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
    shares = [call.shares for call in found]
    torch._foreach_minimum_([sums.low for sums in mine], low)
    torch._foreach_maximum_([sums.high for sums in mine], high)
    torch._foreach_add_([sums.values for sums in mine], values)
    torch._foreach_add_([sums.shares for sums in mine], shares)
    second = [part for sums, _ in calls for part in sums.second]
    if second:
        torch._foreach_add_(second, [part for call in found for part in call.second])
    finite = [largest_of(parts).isfinite() for parts in (low, high, shares)]
    return torch.stack(finite).all(dim=0)


def _joined(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[torch.Size], dtype: torch.dtype
) -> list[Tensor]:
    """Return the parts of each call as one tensor of a shape, converted all at once."""
    flat = torch.cat([part.reshape(-1) for call in parts for part in call]).to(dtype)
    pieces = torch.split(flat, [shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


#: Of ``AttentionSums``; axes: B buckets, H heads, D columns, P k and v, T q, k and v, S entropy and
#: locality, C counts, M second moments: q's and k's, or none, F formats.
SUMS = {
    "q_amax": Field(torch.float32, "BH"),
    "low": Field(torch.float32, "BPHD", signed=True),
    "high": Field(torch.float32, "BPHD", signed=True),
    "values": Field(torch.float64, "BTHD", signed=True),
    "shares": Field(torch.float64, "BSH"),
    "counts": Field(torch.int64, "BC"),
    "second": Field(torch.float64, "MHDD", signed=True),
    "format_lost": Field(torch.float64, "FH"),
    "format_power": Field(torch.float64, "H"),
}


def check_attention_sums(where: str, tensors: Mapping[str, Tensor], buckets: int) -> None:
    """Hold the tensors of one module against ``AttentionSums``.

    Raises:
        LookupError, ValueError: a field that is missing or unknown, or of a wrong dtype, shape or
            value.
    """
    moments, heads, columns, _ = tensors["second"].shape
    if moments not in (0, 2):
        raise ValueError(f"{where}/second: of {moments}, wanted 0 or 2")
    sizes = {"B": buckets, "H": heads, "D": columns, "M": moments}
    sizes |= {"P": 2, "T": 3, "S": 2, "C": len(Counts._fields), "F": len(ATTENTION_FORMATS)}
    check_fields(where, tensors, SUMS, sizes)
    statistics = attention_statistics_of(tensors)
    check_attention(where, statistics.tensors(), buckets)


def attention_statistics_of(sums: Mapping[str, Tensor]) -> AttentionStatistics:
    """Return what sums that were taken come to."""
    counts = dict(zip(Counts._fields, sums["counts"].unbind(dim=1), strict=True))
    values, (low, high) = sums["values"], (sums["low"], sums["high"])
    entropy, locality = (
        (total / counts[rows].clamp(min=1).unsqueeze(1)).clamp(0, 1).float()
        for total, rows in zip(sums["shares"].unbind(1), ("rows", "local_rows"), strict=True)
    )
    q_mean, k_mean, v_mean = (
        (values[:, i] / counts[of].clamp(min=1).reshape(-1, 1, 1)).float()
        for i, of in enumerate(("queries", "keys", "keys"))
    )
    second = [
        (total / counts[of].sum().clamp(min=1)).float()
        for total, of in zip(sums["second"], ("queries", "keys"), strict=False)
    ]
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
        entropy=entropy,
        locality=locality,
        q_second=second[0] if second else None,
        k_second=second[1] if second else None,
        format_lost=sums["format_lost"] if measured else None,
        format_power=sums["format_power"] if measured else None,
        **counts,
    )


def _counts(q: Tensor, k: Tensor, rows: int, *, cross: bool) -> Counts:
    pictures, queries, keys = len(q), q.shape[2], k.shape[2]
    sampled = pictures * rows
    return Counts(
        pictures * queries, pictures * keys, queries, keys, sampled, 0 if cross else sampled
    )


def _shares(q: Tensor, k: Tensor, scale: float | None, *, cross: bool) -> tuple[Tensor, int]:
    """Return sums over sampled rows of q of entropy and locality, float64 (2, H), and how many.

    Args:
        q, k: float32 (B, H, N, D).
        scale: of q k'; None: 1 / sqrt(D).
        cross: locality is 0.
    """
    queries, (keys, columns) = q.shape[2], k.shape[2:]
    rows = min(ROWS, queries)
    scale = 1 / math.sqrt(columns) if scale is None else scale
    scores = (q[:, :, _places(queries, q.device)] * scale) @ k.transpose(2, 3)
    log = scores.log_softmax(dim=3)
    shares = log.exp()
    # Sums along keys are short enough for float32. All on one key may come out a rounding below.
    bits = log.mul_(shares).sum(dim=3).neg().clamp(min=0)
    entropy = bits.sum(dim=(0, 2), dtype=torch.float64) / (math.log(keys) or 1.0)
    if cross:
        return torch.stack([entropy, torch.zeros_like(entropy)]), rows
    near = shares.mul_(_near(queries, keys, q.device)).sum(dim=3)
    return torch.stack([entropy, near.sum(dim=(0, 2), dtype=torch.float64)]), rows


@lru_cache(maxsize=64)
def _places(queries: int, device: torch.device) -> Tensor:
    """Return which rows of q are sampled."""
    rows = min(ROWS, queries)
    # Made where it is used: copying it there would wait for the device.
    return torch.arange(1, 2 * rows, 2, device=device) * queries // (2 * rows)


@lru_cache(maxsize=64)
def _near(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return 1 where a key is near a sampled query, float32 (rows, keys)."""
    places = _places(queries, device).unsqueeze(1)
    return ((places - torch.arange(keys, device=device)).abs() <= keys // _NEAR).float()


def _rows_together(t: Tensor) -> Tensor:
    """Return heads in float32 that lie one behind another: a CPU multiplies others row by row."""
    return t.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _second(t: Tensor) -> Tensor:
    """Return the sum of x x' over all rows x of each head, float64 (H, D, D)."""
    return (t.transpose(2, 3) @ t).sum(dim=0, dtype=torch.float64)
