"""The result of an evaluation as one value: everything that a report shows is in here."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from quantkit.eval.judging.gates import Compression, Gate, State, state_of
from quantkit.eval.judging.noise_floor import FloorGap, compared_floors
from quantkit.eval.judging.serialize import (
    comparison_json,
    gap_json,
    gates_json,
    pictures_json,
    plain,
    steps_json,
)
from quantkit.eval.judging.verdict import write_verdict
from quantkit.eval.measuring.comparison import Comparison
from quantkit.eval.measuring.composition import PictureKinds, find_bounds, sort_pictures
from quantkit.eval.measuring.range_map import RangeMap
from quantkit.eval.measuring.step_errors import StepErrors

from quantkit.checkpoint.format_decisions import FormatDecision

#: Raised when a key of the JSON changes its meaning or goes away; new keys do not raise it.
#: 2: the verdict's text is a paragraph, and noise_floor, timesteps and packing are there.
#: 3: gates have a state, of three; "passed" is null where a gate is open or was not measured.
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
class Packing:
    """Totals of packing over all packed components."""

    #: the recipe's name as the checkpoint records it; empty when it records none
    recipe: str
    #: their Linear and Conv2d, and how many of those are packed and sparse
    layers: int
    packed: int
    sparse: int
    #: share of the weights of those layers that 2:4 dropped, 0 to 0.5
    pruned: float


@dataclass(frozen=True)
class QuantizedBy:
    """Another tool's quantization of a component, as its config says."""

    component: str
    tool: str
    #: as pip calls it, and the version that loaded and computed it
    package: str
    version: str
    #: what decides the result, in words by key
    settings: tuple[tuple[str, str], ...]
    #: all of its quantization_config
    config: dict[str, Any]

    @property
    def words(self) -> str:
        """Tool, version and settings, as ``SDNQ 0.2.8 (weights_dtype int8)``."""
        settings = ", ".join(f"{key} {value}" for key, value in self.settings)
        return f"{self.tool} {self.version}{f' ({settings})' if settings else ''}"


@dataclass(frozen=True)
class LayerRow:
    """One Linear or Conv2d of a denoising component."""

    component: str
    name: str
    kind: str
    shape: tuple[int, ...]
    #: in words, as "e4m3fn per channel, 2:4, input per token"
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
class AttentionFormats:
    """The formats of an attention module that were chosen by error, and the reason."""

    component: str
    module: str
    decision: FormatDecision


@dataclass(frozen=True)
class KernelCalls:
    """Calls of one variant of an operation during generation, by backend."""

    op: str
    variant: str
    backend: str
    count: int


@dataclass(frozen=True)
class Kernels:
    """Kernel calls of the packed layers during generation."""

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
class GenerationFacts:
    """Settings and times of generation."""

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
    #: most memory of the card that torch had in use at once; None: no card
    original_peak_bytes: int | None = None
    packed_peak_bytes: int | None = None


@dataclass(frozen=True)
class Timesteps:
    """Error over the denoising steps, as NMSE; None where it was not measured."""

    #: latents of the packed pipeline against the original's, from the same noise
    divergence: StepErrors | None
    #: answers of the packed denoiser on the original's own latents
    local: StepErrors | None
    #: how much was compared, or why nothing was
    note: str = ""


@dataclass(frozen=True)
class NextStep:
    """One thing to do next."""

    #: in words, with what it would bring
    what: str
    #: to type; empty when there is none
    command: str
    #: module paths that it is about
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """One evaluation, complete."""

    title: str
    created: str
    quantkit_version: str
    compression: Compression
    original: ModelFacts
    packed: ModelFacts
    packing: Packing
    run: GenerationFacts
    comparison: Comparison
    #: empty when it was not asked for
    noise_floor: tuple[FloorGap, ...]
    timesteps: Timesteps
    gates: tuple[Gate, ...]
    kernels: Kernels
    layers: tuple[LayerRow, ...]
    #: name and value, as ("torch", "2.9.0")
    environment: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    #: what a reader must know before trusting the numbers
    warnings: tuple[str, ...] = ()
    #: which other tools quantized the second pipeline; empty when quantkit packed it
    quantized_by: tuple[QuantizedBy, ...] = ()
    #: compared prompts that calibration has seen, too; None: not known
    calibrated_on: int | None = None
    #: what would help, the cheapest first; empty when the gates pass
    next_steps: tuple[NextStep, ...] = ()
    #: empty where the recipe gives the formats of attention
    attention_formats: tuple[AttentionFormats, ...] = ()
    #: what calibration saw of the layers' inputs; None: not known, or not by timestep
    ranges: RangeMap | None = None

    def __repr__(self) -> str:
        """Return title and verdict: the report itself has pages."""
        return f"{self.title}\n{self.verdict}"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; infinities become null, with a note."""
        body = {
            field.name: plain(getattr(self, field.name))
            for field in fields(self)
            if field.name not in {"comparison", "noise_floor", "timesteps"}
        }
        kernels = {
            **body["kernels"],
            "total_calls": self.kernels.total,
            "calls_by_backend": self.kernels.by_backend,
        }
        return {
            "schema": "quantkit.report",
            "schema_version": SCHEMA_VERSION,
            "verdict": {
                "state": self.state.value,
                "passed": self.passed,
                "text": self.verdict,
            },
            **body,
            "gates": gates_json(self.gates),
            "pictures": pictures_json(self.pictures),
            "comparison": comparison_json(self.comparison),
            "kernels": kernels,
            "noise_floor": [gap_json(gap) for gap in self.noise_floor],
            "timesteps": {
                "unit": "NMSE",
                "divergence": steps_json(self.timesteps.divergence),
                "local": steps_json(self.timesteps.local),
                "note": self.timesteps.note,
            },
        }

    @property
    def computed_by(self) -> str:
        """Backends of the packed layers, most calls first, or the tools that quantized them."""
        tools = dict.fromkeys(by.tool for by in self.quantized_by)
        return ", ".join(tools or self.kernels.by_backend)

    @cached_property
    def pictures(self) -> PictureKinds:
        """The kind of every picture, the changed ones first."""
        floors = compared_floors(gap.floor for gap in self.noise_floor)
        return sort_pictures(self.comparison, find_bounds(floors))

    @property
    def state(self) -> State:
        """The state of all gates together."""
        return state_of(self.gates)

    @property
    def passed(self) -> bool:
        """True when every gate that was measured passes."""
        return self.state is State.PASSED

    @property
    def verdict(self) -> str:
        """Verdict and reasons in one paragraph."""
        return write_verdict(
            self.gates, self.compression, self.comparison, self.noise_floor, self.pictures
        )
