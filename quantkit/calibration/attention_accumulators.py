"""The running sums of one attention module, on its device, and what they come to."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.calibration.attention_statistics import AttentionStatistics, check_attention
from quantkit.calibration.format_errors import FormatErrors
from quantkit.calibration.layer_fields import Field, check_fields
from quantkit.models.attention import Heads
from quantkit.numerics.attention_formats import ATTENTION_FORMATS

#: A module's sums by name, on the CPU.
AttentionSums = dict[str, Tensor]

#: Rows of q of every picture and call whose probabilities are computed; all would cost what
#: attention does.
ROWS = 32
#: A key is near a query that is at most so small a part of all keys away, on either side: about a
#: tenth of them.
_NEAR = 20


class AttentionAccumulators:
    """The accumulators of one module over all timestep buckets."""

    def __init__(
        self,
        heads: int,
        columns: int,
        buckets: int,
        bad: Tensor,
        *,
        bare: bool,
        errors_from: int | None = None,
    ) -> None:
        """Begin with nothing seen.

        Args:
            heads: how many.
            columns: of each.
            buckets: how many.
            bad: a bool on the device of q, k and v, set once they held NaN or Inf.
            bare: q and k come straight from their projections, so second moments are of use.
            errors_from: measure the errors of formats in calls with so many keys; None: in none.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=bad.device)

        self._q_amax = zeros(buckets, heads, dtype=torch.float32)
        #: of k and v
        self._low = zeros(buckets, 2, heads, columns, dtype=torch.float32)
        self._high = torch.zeros_like(self._low)
        #: of q, k and v
        self._values = zeros(buckets, 3, heads, columns)
        #: of entropies and localities
        self._shares = zeros(buckets, 2, heads)
        #: by bucket: queries, keys, the most of either in a call, sampled rows, those of locality
        self._counts = [[0] * len(_COUNTS) for _ in range(buckets)]
        #: of q and k
        self._second = zeros(2 if bare else 0, heads, columns, columns)
        self._errors_from = errors_from
        self._errors = FormatErrors(heads, bad.device)
        self._bad = bad

    def add(self, bucket: int, heads: Heads, scale: float | None, *, cross: bool) -> None:
        """Add one call, without waiting for the device.

        Args:
            bucket: of the call.
            heads: what it multiplies, (B, H, N, D).
            scale: of q k'; None: 1 / sqrt(D).
            cross: keys are not the queries' own sequence.
        """
        q, k, v = (t.detach() for t in heads)
        amax = q.abs().amax(dim=(0, 2, 3)).float()
        low = torch.stack([t.amin(dim=(0, 2)) for t in (k, v)]).float()
        high = torch.stack([t.amax(dim=(0, 2)) for t in (k, v)]).float()
        shares, rows = _shares(q, k, scale, cross=cross)
        first = not self._counts[bucket][0]
        self._q_amax[bucket] = torch.maximum(self._q_amax[bucket], amax)
        self._low[bucket] = low if first else torch.minimum(self._low[bucket], low)
        self._high[bucket] = high if first else torch.maximum(self._high[bucket], high)
        sums = [t.sum(dim=(0, 2), dtype=torch.float32) for t in (q, k, v)]
        self._values[bucket] += torch.stack(sums).double()
        self._shares[bucket] += shares
        if len(self._second):
            self._second += torch.stack([_second(t) for t in (q, k)])
        self._count(bucket, q, k, rows, cross=cross)
        if self._errors_from is not None and k.shape[2] >= self._errors_from:
            self._errors.add(heads, scale)
        found = [amax, low.flatten(), high.flatten(), shares.flatten()]
        self._bad |= ~torch.cat(found).isfinite().all()

    def _count(self, bucket: int, q: Tensor, k: Tensor, rows: int, *, cross: bool) -> None:
        pictures, queries, keys = len(q), q.shape[2], k.shape[2]
        before = self._counts[bucket]
        self._counts[bucket] = [
            before[0] + pictures * queries,
            before[1] + pictures * keys,
            max(before[2], queries),
            max(before[3], keys),
            before[4] + pictures * rows,
            before[5] + (0 if cross else pictures * rows),
        ]

    def taken(self) -> AttentionSums:
        """Return the sums so far, as ``put`` and ``attention_statistics_of`` take them."""
        return {
            "q_amax": self._q_amax.cpu(),
            "low": self._low.cpu(),
            "high": self._high.cpu(),
            "values": self._values.cpu(),
            "shares": self._shares.cpu(),
            "counts": torch.tensor(self._counts),
            "second": self._second.cpu(),
            "format_lost": self._errors.lost.cpu(),
            "format_power": self._errors.power.cpu(),
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
        self._q_amax.copy_(sums["q_amax"])
        self._low.copy_(sums["low"])
        self._high.copy_(sums["high"])
        self._values.copy_(sums["values"])
        self._shares.copy_(sums["shares"])
        self._counts = sums["counts"].tolist()
        self._second.copy_(sums["second"])
        self._errors.lost.copy_(sums["format_lost"])
        self._errors.power.copy_(sums["format_power"])


#: What is counted of a bucket, in this order: fields of ``AttentionStatistics``.
_COUNTS = ("queries", "keys", "call_queries", "call_keys", "rows", "local_rows")
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
    sizes |= {"P": 2, "T": 3, "S": 2, "C": len(_COUNTS), "F": len(ATTENTION_FORMATS)}
    check_fields(where, tensors, SUMS, sizes)
    statistics = attention_statistics_of(tensors)
    check_attention(where, statistics.tensors(), buckets)


def attention_statistics_of(sums: Mapping[str, Tensor]) -> AttentionStatistics:
    """Return what sums that were taken come to."""
    counts = dict(zip(_COUNTS, sums["counts"].unbind(dim=1), strict=True))
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


def _shares(q: Tensor, k: Tensor, scale: float | None, *, cross: bool) -> tuple[Tensor, int]:
    """Return sums over sampled rows of q of entropy and locality, float64 (2, H), and how many."""
    queries, (keys, columns) = q.shape[2], k.shape[2:]
    rows = min(ROWS, queries)
    # Made where it is used: copying it there would wait for the device.
    places = torch.arange(1, 2 * rows, 2, device=q.device) * queries // (2 * rows)
    scale = 1 / math.sqrt(columns) if scale is None else scale
    scores = (q[:, :, places].float() * scale) @ k.float().transpose(2, 3)
    log = scores.log_softmax(dim=3)
    shares = log.exp()
    entropy = -(shares * log).sum(dim=(0, 2, 3), dtype=torch.float64) / (math.log(keys) or 1.0)
    # All on one key may come out a rounding below.
    entropy = entropy.clamp(min=0)
    if cross:
        return torch.stack([entropy, torch.zeros_like(entropy)]), rows
    away = (places.unsqueeze(1) - torch.arange(keys, device=q.device)).abs()
    near = (shares * (away <= keys // _NEAR)).sum(dim=(0, 2, 3), dtype=torch.float64)
    return torch.stack([entropy, near]), rows


def _second(t: Tensor) -> Tensor:
    """Return the sum of x x' over all rows x of each head, float64 (H, D, D)."""
    t = t.float()
    return (t.transpose(2, 3) @ t).sum(dim=0, dtype=torch.float64)
