"""The figures of a run of the model benchmark."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from quantkit.bench.kernels.figures import Measurement, Row
from quantkit.bench.kernels.timing import Timing
from quantkit.bench.models.denoisers import Denoiser
from quantkit.bench.models.profiling import KernelTime


@dataclass(frozen=True)
class ModelBenchSettings:
    """Settings of a step."""

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


@dataclass(frozen=True, kw_only=True)
class ModelRow(Row):
    """One contender.

    Its error is that of the worst packed layer over the rms of ``reference``; of others from
    float16, ||difference|| / ||output||. Its timing is of one step.
    """

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


@dataclass(frozen=True, kw_only=True)
class ModelResult(Measurement[ModelRow]):
    """A whole run."""

    schema: ClassVar[str] = "quantkit.model.bench"

    denoiser: Denoiser
    settings: ModelBenchSettings

    def circumstances(self) -> Mapping[str, Any]:
        """Return the model and how it is run."""
        return model_facts(self.denoiser, self.settings)


def model_facts(denoiser: Denoiser, settings: ModelBenchSettings) -> dict[str, Any]:
    """Return the JSON values of a model and how it is run."""
    told = asdict(settings)
    del told["scratch"]
    return {"model": asdict(denoiser), "settings": told}
