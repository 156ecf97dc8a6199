"""One evaluation from two directories to the finished result. Writing it is in report.py.

The original runs once, in ``measure_baseline``; any number of packed pipelines is then compared
with it by ``evaluate``.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from quantkit.eval.judging.evaluation_result import LayerRow, Packing, Report, Timesteps
from quantkit.eval.judging.gates import Compression, Limits, find_compression, judge
from quantkit.eval.judging.layer_table import Place, layer_rows
from quantkit.eval.judging.next_step import Treated, find_next_steps
from quantkit.eval.judging.noise_floor import (
    Floor,
    Original,
    compared_floors,
    measure_floors,
    measure_gaps,
    picture_names,
)
from quantkit.eval.judging.quantized_pipeline import (
    QuantizedPipeline,
    computing,
    files_before,
    load_quantized,
    open_quantized,
    quantized_by,
    quantized_layers,
)
from quantkit.eval.judging.report_facts import (
    attention_formats,
    describe_environment,
    kernel_facts,
    model_facts,
    original_files,
    packed_files,
    packing_facts,
    run_facts,
    unpacked_files,
    warn,
)
from quantkit.eval.judging.unpacked_pipeline import open_unpacked, unpacked_layers
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.generation import (
    GenerationSettings,
    Viewer,
    generate,
    rehearse_pictures,
    unseen,
)
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.measuring.range_map import RangeMap
from quantkit.eval.measuring.seen_prompts import count_seen
from quantkit.eval.measuring.step_errors import Divergence, StepErrors, Trajectory, shadowed

from quantkit._version import __version__
from quantkit.checkpoint.reader import Packed, open_packed
from quantkit.device import log
from quantkit.errors import ModelError
from quantkit.inference.layers.deviation import LayerDeviation, watch
from quantkit.inference.layers.layer_summary import LayerInfo, iterate_packed, packed_layers
from quantkit.inference.loading.pipeline_loading import load_pipeline
from quantkit.models.component_kinds import kind_of
from quantkit.models.source import Model, open_model, open_others
from quantkit.pipelines.calling import fewest_steps
from quantkit.pipelines.running import choose_dtype, quiet_libraries
from quantkit.pipelines.running import load_pipeline as load_original
from quantkit.progress import Progress, silent
from quantkit.sensitivity.sensitivity_file import Sensitivity

#: Steps and prompts that are computed again on reference: every layer, early and late noise.
WATCHED_STEPS = 2
WATCHED_PROMPTS = 1
#: Prompts whose every step is answered by both denoisers, by kind of device. The quartiles of one
#: step lie within a factor of two (the demo's FP8), so few suffice where kernels are emulated.
LOCAL_PROMPTS = {"cpu": 2, "cuda": 8}


@dataclass(frozen=True)
class Pair:
    """Original and packed directory, both opened and checked."""

    #: the original as the user wrote it: a path or a hub id
    name: str
    model: Model
    packed: Packed
    #: the second directory where nothing in it is packed: a 16-bit pipeline, as a recovered one
    plain: Model | None = None
    #: the second directory, or .gguf file, where another tool quantized it
    quantized: QuantizedPipeline | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the second pipeline has to run in, and so both; None: any."""
        return self.quantized.dtype if self.quantized else None

    @property
    def title(self) -> str:
        """Both names, as the heading of a report."""
        return f"{self.packed.path.name} against {Path(self.name).name}"


def require_pipeline(model: str | Model) -> Model:
    """Open a pipeline directory or hub id.

    Raises:
        ModelError: no pipeline: a component alone makes no pictures.
    """
    opened = model if isinstance(model, Model) else open_model(model)
    if not opened.is_pipeline:
        raise ModelError(
            f"{opened.path}: a component alone cannot make pictures; pass the directory of its "
            "pipeline"
        )
    return opened


def open_pair(model: str | Model, packed: Path) -> Pair:
    """Open both directories.

    Args:
        model: the original.
        packed: packed by quantkit; or a 16-bit pipeline of the model; or what another tool
            quantized: a pipeline, a component alone, a .gguf file.

    Raises:
        ModelError: MODEL is no pipeline: a component alone makes no pictures. Or the two do not
            belong together. Or what another tool quantized cannot be loaded here.
        CheckpointError: PACKED is no pipeline, or breaks a rule of FORMAT.md.
    """
    opened = require_pipeline(model)
    name = str(opened.path) if isinstance(model, Model) else model
    found = Packed(packed, ()) if packed.is_file() else open_packed(packed)
    if not found.components:
        quantized = open_quantized(packed, opened)
        if quantized is None:
            return Pair(name, opened, found, open_unpacked(packed, opened))
        opened = _with_others(opened, {c.name for c in quantized.components})
        return Pair(name, opened, found, quantized=quantized)
    opened = _with_others(opened, {c.name for c in found.components})
    names = {component.name for component in opened.components}
    for component in found.components:
        if component.name not in names:
            raise ModelError(
                f"{packed}: packed {component.name or 'component alone'}, but {name} has "
                f"{', '.join(sorted(names))}; pass the original and the packed directory of the "
                "same pipeline"
            )
    return Pair(name, opened, found)


def common_dtype(pairs: Sequence[Pair]) -> torch.dtype | None:
    """Return the dtype that all pipelines have to run in; None: any.

    Raises:
        ModelError: there is none that all can run in.
    """
    dtypes = {pair.dtype: pair.packed.path for pair in pairs if pair.dtype is not None}
    if len(dtypes) > 1:
        told = ", ".join(f"{path} {dtype}".replace("torch.", "") for dtype, path in dtypes.items())
        raise ModelError(f"each runs in its own dtype alone ({told}); report on them one by one")
    return next(iter(dtypes), None)


def _with_others(model: Model, names: Collection[str]) -> Model:
    """Return the original with the text encoders and VAE that are packed in the other directory."""
    if set(names) <= {component.name for component in model.components}:
        return model
    others = tuple(component for component in open_others(model) if component.name in names)
    return replace(model, components=model.components + others)


@dataclass(frozen=True)
class Background:
    """Facts about the making of the packed pipeline that are not in its files."""

    #: prompts that its scales were chosen on; None: not known
    calibrated: tuple[str, ...] | None = None
    #: what other treatments of its layers would do, and the file as it was given
    sensitivity: tuple[Sensitivity, str] | None = None
    #: what calibration saw of the layers' inputs, by timestep
    ranges: RangeMap | None = None
    #: number of prompts that may be compared; None: not known
    prompts: int | None = None


@dataclass(frozen=True)
class Baseline:
    """The original, run once, and what any packed pipeline is compared with."""

    original: Original
    #: empty when the noise floor was not asked for
    floors: tuple[Floor, ...]
    backbones: Backbones


@quiet_libraries()
def rehearse_original(model: Model, settings: GenerationSettings, device: torch.device) -> None:
    """Load the original, try what the evaluation will do, and drop it: before other long work.

    Raises:
        ModelError: it cannot be loaded, or run so.
    """
    rehearse_pictures(load_original(model, device), settings)


@quiet_libraries()
def measure_baseline(
    model: Model,
    settings: GenerationSettings,
    *,
    backbones: Backbones,
    device: torch.device,
    noise_floor: bool,
    dtype: torch.dtype | None = None,
    viewer: Viewer = unseen,
    progress: Progress = silent,
) -> Baseline:
    """Run the original, and twice more for its noise floor.

    Args:
        model: the original.
        settings: given to every pipeline alike.
        backbones: the networks of LPIPS and CLIP score.
        device: where every pipeline runs.
        noise_floor: whether to measure it.
        dtype: of every pipeline; None for ``choose_dtype``'s.
        viewer: told the original's pictures, batch by batch.
        progress: told about every step.

    Raises:
        NonFiniteError: a picture holds NaN or Inf.
    """
    dtype = dtype or choose_dtype(model, device)
    pipe = load_original(model, device, dtype)
    settings = rehearse_pictures(pipe, settings)
    trajectory = Trajectory(settings.steps)
    pictures = generate(
        pipe, settings, label="original", progress=progress, listener=trajectory.listen,
        viewer=viewer, replay=True,
    )  # fmt: skip
    original = Original(model, settings, device, dtype, pictures, trajectory)
    floors = measure_floors(pipe, original, backbones, progress) if noise_floor else ()
    return Baseline(original, floors, backbones)


@quiet_libraries()
def evaluate(
    pair: Pair,
    baseline: Baseline,
    *,
    limits: Limits,
    title: str | None = None,
    commands: Sequence[str] = (),
    background: Background = Background(),
    viewer: Viewer = unseen,
    progress: Progress = silent,
) -> tuple[Report, Pairs]:
    """Run the packed pipeline, measure, and return the result with its pictures.

    Args:
        pair: what ``open_pair`` returned.
        baseline: what ``measure_baseline`` returned of the same original.
        limits: the gates' limits.
        title: the report's heading; by default the two names.
        commands: what a reader types to make the report again.
        background: what is known of how it was packed.
        viewer: told the packed pipeline's pictures, batch by batch.
        progress: told about every step.

    Raises:
        NonFiniteError: a picture holds NaN or Inf.
    """
    original = baseline.original
    settings, device = original.settings, original.device
    pipe = _load(pair, original)
    divergence = Divergence(original.trajectory)
    with log.record() as calls, computing(pair.quantized):
        packed = generate(
            pipe, settings, label="packed", progress=progress, listener=divergence.listen,
            viewer=viewer, replay=not pair.quantized,
        )  # fmt: skip
    dense = load_original(pair.model, device, original.dtype)
    # Only of quantkit's own layers is there a reference to hold them against.
    deviations = _watch(pipe, dense, settings, progress) if pair.packed.components else {}
    local = _shadow(pair, pipe, dense, original, progress)
    # By the names of the files: transformers may have renamed those of a text encoder.
    places = {(c, path): (c, layer.name) for c, path, layer in iterate_packed(pipe)}
    infos = {places[info.component, info.name]: info for info in packed_layers(pipe)}
    deviations = {places.get(place, place): found for place, found in deviations.items()}
    pairs = Pairs(
        picture_names(len(settings.prompts)), original.generated.pictures, packed.pictures,
        settings.prompts,
    )  # fmt: skip
    comparison = compare(pairs, baseline.backbones, progress=progress)
    layers, packing, compression = _describe(pair, infos, deviations, progress)
    before, after = _files(pair)
    by = quantized_by(pair.quantized) if pair.quantized else ()
    report = Report(
        title=title or pair.title,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        quantkit_version=__version__,
        compression=compression,
        original=model_facts(pair.name, before),
        packed=model_facts(str(pair.packed.path), after),
        packing=packing,
        run=run_facts(original, packed=packed, calls=calls),
        comparison=comparison,
        noise_floor=measure_gaps(comparison, baseline.floors, limits.margins),
        timesteps=_timesteps(divergence.errors(), local),
        gates=judge(comparison, limits, compression, compared_floors(baseline.floors)),
        kernels=kernel_facts(calls, deviations),
        layers=layers,
        environment=describe_environment(device, by),
        commands=tuple(commands),
        quantized_by=by,
        attention_formats=attention_formats(pair.packed),
    )
    warnings = (*warn(pair.model, pair.packed, report), *_seen(settings, background))
    ranges = background.ranges and background.ranges.of([(r.component, r.name) for r in layers])
    seen = _count(settings, background)
    report = replace(report, warnings=warnings, calibrated_on=seen, ranges=ranges)
    steps = find_next_steps(report, _treated(pair, background), prompts=background.prompts)
    return replace(report, next_steps=steps), pairs


def _count(settings: GenerationSettings, background: Background) -> int | None:
    known = background.calibrated
    return None if known is None else count_seen(settings.prompts, known)


def _seen(settings: GenerationSettings, background: Background) -> Iterator[str]:
    """Say that prompts are calibrated on, if they are."""
    if found := _count(settings, background):
        yield (
            f"{found} of the {len(settings.prompts)} compared prompts are calibrated on, too: on "
            "them the pictures are better than on others; compare others."
        )


def _treated(pair: Pair, background: Background) -> Treated | None:
    """Return how the layers are packed that the sensitivity is about."""
    if background.sensitivity is None:
        return None
    sensitivity, path = background.sensitivity
    for component in pair.packed.components:
        if sensitivity.component in ("", component.name):
            return Treated(sensitivity, path, component.config.layers)
    return None


def _load(pair: Pair, original: Original) -> Any:
    if pair.quantized:
        return load_quantized(pair.quantized, pair.model, original.device, original.dtype)
    if pair.plain:
        return load_original(pair.plain, original.device, original.dtype)
    return load_pipeline(pair.packed.path, torch_dtype=original.dtype, device=original.device)


def _describe(
    pair: Pair,
    infos: Mapping[Place, LayerInfo],
    deviations: Mapping[Place, LayerDeviation],
    progress: Progress,
) -> tuple[tuple[LayerRow, ...], Packing, Compression]:
    if pair.quantized:
        return *quantized_layers(pair.quantized, pair.model), Compression.QUANTIZED
    if pair.plain:
        layers, packing = unpacked_layers(pair.model, pair.plain, progress)
        return layers, packing, Compression.SPARSE if packing.sparse else Compression.NONE
    layers = layer_rows(pair.model, pair.packed, infos, deviations, progress)
    schemes = {entry.scheme for c in pair.packed.components for entry in c.config.schemes}
    return layers, packing_facts(pair.packed, layers), find_compression(schemes)


def _files(pair: Pair) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the weight files of what was packed, before and after."""
    if pair.quantized:
        return files_before(pair.quantized, pair.model), pair.quantized.files
    before = original_files(pair.model, pair.packed)
    return before, unpacked_files(pair.plain) if pair.plain else packed_files(pair.packed)


def _first(settings: GenerationSettings, count: int) -> GenerationSettings:
    """Return the settings of the first ``count`` prompts, at one time."""
    return replace(
        settings, prompts=settings.prompts[:count], seeds=settings.seeds[:count], batch=count
    )


def _watch(
    pipe: Any, dense: Any, settings: GenerationSettings, progress: Progress
) -> dict[Place, LayerDeviation]:
    few = _first(settings, WATCHED_PROMPTS)
    few = replace(few, steps=fewest_steps(pipe, few.call, WATCHED_STEPS).steps)
    with watch(pipe, dense=dense) as deviations:
        generate(pipe, few, label="kernels against reference", progress=progress)
    return deviations.layers


def _shadow(
    pair: Pair, pipe: Any, dense: Any, original: Original, progress: Progress
) -> StepErrors | None:
    kind = "cpu" if original.device.type == "cpu" else "cuda"
    few = _first(original.settings, min(LOCAL_PROMPTS[kind], original.settings.batch))
    compared = pair.quantized or pair.plain or pair.packed
    denoisers = {c.name for c in pair.model.components if kind_of(c.family) is None}
    names = tuple(c.name for c in compared.components if c.name in denoisers)
    if not names:
        return None
    with shadowed(dense, pipe, names) as local, computing(pair.quantized):
        generate(dense, few, label="error of every step", progress=progress, listener=local.listen)
    return local.errors()


def _timesteps(divergence: StepErrors | None, local: StepErrors | None) -> Timesteps:
    if local is None and divergence is None:
        return Timesteps(None, None, "not measured: the pipeline calls nobody back after a step")
    apart = "the latents are too large to be kept and compared"
    if divergence is not None:
        apart = f"divergence over {len(divergence.values[0])} prompts"
    alone = "no local error: the denoisers are the original's own"
    if local is not None:
        alone = (
            f"local error over {len(local.values[0])} rows of the denoiser's batches; with "
            "guidance a prompt has two"
        )
    return Timesteps(divergence, local, f"{apart}, {alone}")
