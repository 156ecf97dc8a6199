"""The figures of a run of the model benchmark, and their file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.bench.kernels.kernel_figures import Verdict
from quantkit.bench.kernels.machine import Machine
from quantkit.bench.kernels.timing import Timing, TimingPlan
from quantkit.bench.models.denoisers import Denoiser
from quantkit.bench.models.profiling import KernelTime
from quantkit.storage.files import staged_file

SCHEMA, VERSION = "quantkit.model.bench", 1


@dataclass(frozen=True)
class ModelBenchSettings:
    """How the denoiser is run."""

    #: latents at once
    batch: int
    #: of the latents: an eighth of the picture's width and height
    size: int
    #: compile each repeated block instead of the whole model
    compile_blocks: bool = False
    #: replay what is compiled from a CUDA graph
    graph: bool = False
    profile: bool = False
    #: pictures with channels last in memory, in every contender
    channels_last: bool = False
    #: one product for the projections of an input, in every contender
    fuse_projections: bool = False
    #: formats of queries and keys: each contender runs with its attention on these codes, too
    attention: tuple[str, ...] = ()
    #: attention over fewer keys stays torch's
    min_keys: int = 512
    #: scales of codes of attention are static, from a step of the model itself
    static_scales: bool = False
    #: steps that are launched one after another and waited for once; None: not measured
    in_a_row: int | None = None
    #: where packed files lie for a while; None: where the system keeps such
    scratch: Path | None = None


@dataclass(frozen=True)
class ModelRow:
    """One contender."""

    contender: str
    verdict: Verdict
    #: why it was not timed; empty when it was
    reason: str = ""
    #: of the worst packed layer over the rms of ``reference``; of others from float16,
    #: ||difference|| / ||output||
    error: float | None = None
    #: of one step
    timing: Timing | None = None
    #: of one step of ``settings.in_a_row``; None where these were not measured
    in_a_row: Timing | None = None
    #: of parameters and buffers, and over the float16 model's
    weight_bytes: int | None = None
    of_f16: float | None = None
    #: weights, and the most that a step allocates beside them; None on the CPU
    peak_bytes: int | None = None
    #: "operation back end" -> calls in one step
    calls: dict[str, int] = field(default_factory=dict)
    #: packing, loading and compiling, where the row before did not do it already
    prepare_seconds: float | None = None
    #: group -> milliseconds; empty without a profile
    profile: dict[str, float] = field(default_factory=dict)
    #: the longest kernels of the profile
    kernels: tuple[KernelTime, ...] = ()


@dataclass(frozen=True)
class ModelResult:
    """A whole run."""

    machine: Machine
    #: before and after, as nvidia-smi names them
    clocks: tuple[dict[str, str], dict[str, str]]
    denoiser: Denoiser
    settings: ModelBenchSettings
    plan: TimingPlan
    rows: tuple[ModelRow, ...]

    @property
    def wrong(self) -> tuple[ModelRow, ...]:
        """Rows whose result is wrong."""
        return tuple(row for row in self.rows if row.verdict is Verdict.WRONG)

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON values."""
        settings = asdict(self.settings)
        del settings["scratch"]
        return {
            "schema": SCHEMA,
            "schema_version": VERSION,
            "machine": asdict(self.machine),
            "clocks": {"before": self.clocks[0], "after": self.clocks[1]},
            "model": asdict(self.denoiser),
            "settings": settings,
            "plan": asdict(self.plan),
            "rows": [{**asdict(row), "verdict": row.verdict.value} for row in self.rows],
        }


def save_model_result(result: ModelResult, path: Path, *, force: bool) -> None:
    """Write the figures.

    Raises:
        OutputError: it exists without ``force``, or cannot be written.
    """
    with staged_file(path, force=force) as stage:
        stage.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
