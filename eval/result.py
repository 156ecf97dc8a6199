"""The result of an evaluation as one value, and its JSON. Everything a report shows is in here."""

import dataclasses
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any

from .comparison import Comparison, Score
from .gates import Compression, Gate, passed

#: Raised when a key changes its meaning or goes away; new keys do not raise it.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelFacts:
    """A model directory, and what identifies its weights."""

    path: str
    #: SHA-256 over the weight files of the denoising components, in order
    digest: str
    #: size of those files
    nbytes: int


@dataclass(frozen=True)
class LayerRow:
    """One Linear or Conv2d of a denoising component."""

    component: str
    name: str
    kind: str
    shape: tuple[int, ...]
    #: in words, as "e4m3fn per channel, 4:2, input per token"
    format: str
    #: what computed it; "torch" for a layer that was not packed
    backend: str
    #: why no kernel of quantkit ran; empty when one did
    reason: str
    #: ||W - dequantized|| / ||W||, from the two files; None when not packed
    weight_error: float | None
    #: ||packed(x) - original(x)|| / ||original(x)|| on real inputs
    output_error: float | None
    #: worst |kernel - reference| / rms(reference) on real inputs
    deviation: float | None
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class KernelCalls:
    """How often one variant of an operation ran during generation, and on what."""

    op: str
    variant: str
    backend: str
    count: int


@dataclass(frozen=True)
class Kernels:
    """What computed the packed layers while the pictures were made."""

    calls: tuple[KernelCalls, ...]
    #: the largest of the layers' deviations, and whose it is; None when none was watched
    worst_deviation: float | None
    worst_layer: str
    #: how much of the run was recomputed on reference
    watched: str

    @property
    def total(self) -> int:
        """All calls, of kernels and of reference."""
        return sum(row.count for row in self.calls)

    @property
    def by_backend(self) -> dict[str, int]:
        """Calls by backend, most first."""
        counts: dict[str, int] = {}
        for row in self.calls:
            counts[row.backend] = counts.get(row.backend, 0) + row.count
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Run:
    """How the pictures were made."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    #: None: the pipeline's own default
    guidance: float | None
    batch: int
    device: str
    dtype: str
    original_seconds: float
    packed_seconds: float
    #: what the times mean: emulated kernels say nothing about a graphics card
    timing_note: str


@dataclass(frozen=True)
class Report:
    """One evaluation, complete."""

    title: str
    created: str
    quantkit_version: str
    compression: Compression
    original: ModelFacts
    packed: ModelFacts
    run: Run
    comparison: Comparison
    gates: tuple[Gate, ...]
    kernels: Kernels
    layers: tuple[LayerRow, ...]
    #: name and value, as ("torch", "2.9.0")
    environment: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    #: what a reader must know before trusting the numbers
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True when every gate that was measured holds."""
        return passed(self.gates)

    @property
    def verdict(self) -> str:
        """Verdict and reasons in one sentence."""
        return write_verdict(self.gates, self.compression)


def write_verdict(gates: tuple[Gate, ...], compression: Compression) -> str:
    """Return the verdict in words: which gates hold, fail or were not measured."""
    failed = [f"{gate.title} is {show(gate.found, gate.unit)}, wanted {gate.wanted}"
              for gate in gates if gate.passed is False]  # fmt: skip
    missing = [gate.title for gate in gates if gate.passed is None]
    tail = f" Not measured: {', '.join(missing)}." if missing else ""
    if failed:
        return f"{compression.value} fails: {'; '.join(failed)}.{tail}"
    if not passed(gates):
        return f"{compression.value} was not judged.{tail}"
    held = ", ".join(f"{gate.title} {show(gate.found, gate.unit)} ({gate.wanted})"
                     for gate in gates if gate.passed)  # fmt: skip
    return f"{compression.value} passes: {held}.{tail}"


def show(value: float | None, unit: str = "") -> str:
    """Return a number with four significant digits and its unit; a dash for None."""
    if value is None:
        return "-"
    if not isfinite(value):
        return "infinite"
    text = f"{value:.4g}"
    return f"{text} {unit}" if unit else text


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; infinities become null, with the summary's note."""
    body = {field.name: _plain(getattr(report, field.name)) for field in dataclasses.fields(report)}
    kernels = {
        **body["kernels"], "total_calls": report.kernels.total,
        "calls_by_backend": report.kernels.by_backend,
    }  # fmt: skip
    verdict = {"passed": report.passed, "text": report.verdict}
    body |= {"comparison": comparison_json(report.comparison), "kernels": kernels}
    return {
        "schema": "quantkit.report",
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict,
    } | body


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the measured values, per pair and together."""
    scores = {name: _score_json(score) for name, score in comparison.scores.items()}
    clip = comparison.clip
    return {
        "names": list(comparison.names),
        "prompts": _plain(comparison.prompts),
        "metrics": scores,
        "clip": clip and {
            "backbone": clip.backbone,
            "original": _score_json(clip.original),
            "packed": _score_json(clip.packed),
            "relative_loss_percent": _plain(clip.loss),
        },
    }  # fmt: skip


def gates_json(gates: tuple[Gate, ...]) -> list[dict[str, Any]]:
    """Return the gates as JSON values."""
    return [_plain(gate) | {"wanted": gate.wanted} for gate in gates]


def _score_json(score: Score) -> dict[str, Any]:
    metric = score.metric
    identical = sum(not isfinite(value) for value in score.values)
    return {
        "title": metric.title,
        "backbone": score.backbone or None,
        "meaning": metric.meaning,
        "better": metric.better.value,
        "unit": metric.unit or None,
        "values": _plain(score.values),
        "null_means": "infinite: identical pictures" if identical else None,
        "summary": _plain(score.summary),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
