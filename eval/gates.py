"""The limits that a packed pipeline must keep, and whether it does."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from quantkit.numerics.scheme import Scheme

from .comparison import Comparison
from .metrics import Better
from .statistics import Summary


class Compression(Enum):
    """What was done to the weights: it decides how much CLIP score may be lost."""

    QUANTIZED = "quantized"
    SPARSE = "4:2"
    BOTH = "quantized and 4:2"
    #: nothing: a 16-bit pipeline whose weights are others, as finetuned to be packed
    NONE = "16-bit"


@dataclass(frozen=True)
class Limits:
    """The gates' limits; a mean must lie strictly on the good side. None: no such gate."""

    ssim: float | None = 0.95
    lpips: float | None = 0.1
    #: CLIP score loss in % of the original's score
    clip_fp8: float | None = 1.0
    clip_sparse: float | None = 2.0
    clip_both: float | None = 3.0

    def clip_loss(self, compression: Compression) -> float | None:
        """Return the limit of the CLIP score loss that applies."""
        return {
            Compression.QUANTIZED: self.clip_fp8,
            Compression.SPARSE: self.clip_sparse,
            Compression.BOTH: self.clip_both,
            Compression.NONE: self.clip_fp8,
        }[compression]


@dataclass(frozen=True)
class Gate:
    """One limit and what was found; ``passed`` is None when it was not measured."""

    metric: str
    title: str
    #: the mean must lie above (higher) or below (lower) the limit
    better: Better
    limit: float
    unit: str
    found: float | None
    passed: bool | None
    #: False when the interval includes the limit: more prompts could change the result
    settled: bool | None
    note: str = ""

    @property
    def wanted(self) -> str:
        """The condition in words, as ``> 0.95``."""
        sign = ">" if self.better is Better.HIGHER else "<"
        return f"{sign} {self.limit:g}{' ' if self.unit else ''}{self.unit}"


def find_compression(schemes: Collection[Scheme]) -> Compression:
    """Return what a packed checkpoint's schemes amount to; every scheme quantizes."""
    sparse = any(scheme.sparsity is not None for scheme in schemes)
    return Compression.BOTH if sparse else Compression.QUANTIZED


def judge(comparison: Comparison, limits: Limits, compression: Compression) -> tuple[Gate, ...]:
    """Return the gates with what the comparison found; a mean decides, never one prompt."""
    ssim, lpips = comparison.scores.get("ssim"), comparison.scores.get("lpips")
    clip = comparison.clip
    rows = (
        _gate(
            "ssim",
            "SSIM",
            Better.HIGHER,
            unit="",
            limit=limits.ssim,
            summary=ssim.summary if ssim else None,
        ),
        _gate(
            "lpips",
            _titled("LPIPS", lpips.backbone if lpips else ""),
            Better.LOWER,
            unit="",
            limit=limits.lpips,
            summary=lpips.summary if lpips else None,
        ),
        _gate(
            "clip_loss",
            _titled("CLIP score loss", clip.backbone if clip else ""),
            Better.LOWER,
            unit="%",
            limit=limits.clip_loss(compression),
            summary=clip.loss if clip else None,
            note=f"limit for {compression.value}",
        ),
    )
    return tuple(gate for gate in rows if gate is not None)


def passed(gates: Collection[Gate]) -> bool:
    """Return True when at least one gate was measured and none of them failed."""
    measured = [gate.passed for gate in gates if gate.passed is not None]
    return bool(measured) and all(measured)


def _gate(
    metric: str,
    title: str,
    better: Better,
    *,
    unit: str,
    limit: float | None,
    summary: Summary | None,
    note: str = "",
) -> Gate | None:
    if limit is None:
        return None
    if summary is None or summary.mean is None:
        reason = "not measured" if summary is None else "the original's score is not positive"
        return Gate(metric, title, better, limit, unit, None, None, None, reason)
    good = summary.mean > limit if better is Better.HIGHER else summary.mean < limit
    interval = summary.interval
    settled = None if interval is None else not interval.low <= limit <= interval.high
    return Gate(metric, title, better, limit, unit, summary.mean, good, settled, note)


def _titled(title: str, backbone: str) -> str:
    return f"{title} [{backbone}]" if backbone else title
