"""One evaluation from two directories to the finished result. Writing it is in report.py.

The original runs once, in ``measure_baseline``; any number of packed pipelines is then compared
with it by ``evaluate``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from quantkit._version import __version__
from quantkit.checkpoint.reader import Packed, open_packed
from quantkit.device import log
from quantkit.errors import ModelError
from quantkit.inference.deviation import LayerDeviation, watch
from quantkit.inference.layers import LayerInfo, iterate_packed, packed_layers
from quantkit.inference.loading import load_pipeline
from quantkit.models.source import Model, open_encoders, open_model
from quantkit.models.text_encoders import TEXT_ENCODERS
from quantkit.pipelines.running import choose_dtype, quiet_libraries
from quantkit.pipelines.running import load_pipeline as load_original
from quantkit.progress import Progress, silent

from .backbones import Backbones
from .comparison import compare
from .gates import Compression, Limits, find_compression, judge
from .generation import GenerationSettings, generate
from .images import Pairs
from .layers import Place, layer_rows
from .noise_floor import Floor, Original, measure_floors, measure_gaps, picture_names
from .report_facts import (
    describe_environment,
    kernel_facts,
    original_facts,
    packed_facts,
    packing_facts,
    run_facts,
    unpacked_facts,
    warn,
)
from .result import LayerRow, Packing, Report, Timesteps
from .step_errors import Divergence, StepErrors, Trajectory, shadowed
from .unpacked_pipeline import open_unpacked, unpacked_layers

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


def require_pipeline(model: str) -> Model:
    """Open a pipeline directory or hub id.

    Raises:
        ModelError: no pipeline: a component alone makes no pictures.
    """
    opened = open_model(model)
    if not opened.is_pipeline:
        raise ModelError(
            f"{model}: a component alone cannot make pictures; pass the directory of its pipeline"
        )
    return opened


def open_pair(model: str, packed: Path) -> Pair:
    """Open both directories; the second may be a 16-bit pipeline too.

    Raises:
        ModelError: MODEL is no pipeline: a component alone makes no pictures. Or the two do not
            belong together.
        CheckpointError: PACKED is no pipeline, or breaks a rule of FORMAT.md.
    """
    opened = require_pipeline(model)
    found = open_packed(packed)
    if not found.components:
        return Pair(model, opened, found, open_unpacked(packed, opened))
    opened = _with_encoders(opened, found)
    names = {component.name for component in opened.components}
    for component in found.components:
        if component.name not in names:
            raise ModelError(
                f"{packed}: packed {component.name or 'component alone'}, but {model} has "
                f"{', '.join(sorted(names))}; pass the original and the packed directory of the "
                "same pipeline"
            )
    return Pair(model, opened, found)


def _with_encoders(model: Model, packed: Packed) -> Model:
    """Return the original with the text encoders that are packed in the other directory."""
    names = {component.name for component in packed.components}
    if names <= {component.name for component in model.components}:
        return model
    encoders = tuple(encoder for encoder in open_encoders(model) if encoder.name in names)
    return replace(model, components=model.components + encoders)


@dataclass(frozen=True)
class Baseline:
    """The original, run once, and what any packed pipeline is compared with."""

    original: Original
    #: empty when the noise floor was not asked for
    floors: tuple[Floor, ...]
    backbones: Backbones


@quiet_libraries()
def measure_baseline(
    model: Model,
    settings: GenerationSettings,
    *,
    backbones: Backbones,
    device: torch.device,
    noise_floor: bool,
    progress: Progress = silent,
) -> Baseline:
    """Run the original, and twice more for its noise floor.

    Args:
        model: the original.
        settings: given to every pipeline alike.
        backbones: the networks of LPIPS and CLIP score.
        device: where every pipeline runs.
        noise_floor: whether to measure it.
        progress: told about every step.

    Raises:
        NonFiniteError: a picture holds NaN or Inf.
    """
    pipe = load_original(model, device)
    trajectory = Trajectory(settings.steps)
    pictures = generate(
        pipe, settings, label="original", progress=progress, listener=trajectory.listen
    )
    dtype = choose_dtype(model, device)
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
    progress: Progress = silent,
) -> tuple[Report, Pairs]:
    """Run the packed pipeline, measure, and return the result with its pictures.

    Args:
        pair: what ``open_pair`` returned.
        baseline: what ``measure_baseline`` returned of the same original.
        limits: the gates' limits.
        title: the report's heading; by default the two names.
        commands: what a reader types to make the report again.
        progress: told about every step.

    Raises:
        NonFiniteError: a picture holds NaN or Inf.
    """
    original = baseline.original
    settings, device = original.settings, original.device
    pipe = _load(pair, original)
    divergence = Divergence(original.trajectory)
    with log.record() as calls:
        packed = generate(
            pipe, settings, label="packed", progress=progress, listener=divergence.listen
        )
    dense = load_original(pair.model, device)
    deviations = {} if pair.plain else _watch(pipe, dense, settings, progress)
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
    report = Report(
        title=title or f"{pair.packed.path.name} against {Path(pair.name).name}",
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        quantkit_version=__version__,
        compression=compression,
        original=original_facts(pair.name, pair.model, pair.packed),
        packed=unpacked_facts(pair.plain) if pair.plain else packed_facts(pair.packed),
        packing=packing,
        run=run_facts(original, packed=packed, calls=calls),
        comparison=comparison,
        noise_floor=measure_gaps(comparison, baseline.floors),
        timesteps=_timesteps(divergence.errors(), local),
        gates=judge(comparison, limits, compression),
        kernels=kernel_facts(calls, deviations),
        layers=layers,
        environment=describe_environment(device),
        commands=tuple(commands),
    )
    return replace(report, warnings=warn(pair.model, pair.packed, report)), pairs


def _load(pair: Pair, original: Original) -> Any:
    if pair.plain:
        return load_original(pair.plain, original.device, original.dtype)
    return load_pipeline(pair.packed.path, torch_dtype=original.dtype, device=original.device)


def _describe(
    pair: Pair,
    infos: Mapping[Place, LayerInfo],
    deviations: Mapping[Place, LayerDeviation],
    progress: Progress,
) -> tuple[tuple[LayerRow, ...], Packing, Compression]:
    if pair.plain:
        layers, packing = unpacked_layers(pair.model, pair.plain, progress)
        return layers, packing, Compression.SPARSE if packing.sparse else Compression.NONE
    layers = layer_rows(pair.model, pair.packed, infos, deviations, progress)
    schemes = {entry.scheme for c in pair.packed.components for entry in c.config.schemes}
    return layers, packing_facts(pair.packed, layers), find_compression(schemes)


def _first(settings: GenerationSettings, count: int) -> GenerationSettings:
    """Return the settings of the first ``count`` prompts, at one time."""
    return replace(
        settings, prompts=settings.prompts[:count], seeds=settings.seeds[:count], batch=count
    )


def _watch(
    pipe: Any, dense: Any, settings: GenerationSettings, progress: Progress
) -> dict[Place, LayerDeviation]:
    few = replace(_first(settings, WATCHED_PROMPTS), steps=min(WATCHED_STEPS, settings.steps))
    with watch(pipe, dense=dense) as deviations:
        generate(pipe, few, label="kernels against reference", progress=progress)
    return deviations.layers


def _shadow(
    pair: Pair, pipe: Any, dense: Any, original: Original, progress: Progress
) -> StepErrors | None:
    kind = "cpu" if original.device.type == "cpu" else "cuda"
    few = _first(original.settings, min(LOCAL_PROMPTS[kind], original.settings.batch))
    compared = pair.plain or pair.packed
    encoders = {c.name for c in pair.model.components if c.family in TEXT_ENCODERS}
    names = tuple(c.name for c in compared.components if c.name not in encoders)
    if not names:
        return None
    with shadowed(dense, pipe, names) as local:
        generate(dense, few, label="error of every step", progress=progress, listener=local.listen)
    return local.errors()


def _timesteps(divergence: StepErrors | None, local: StepErrors | None) -> Timesteps:
    if local is None:
        return Timesteps(None, None, "not measured: the pipeline calls nobody back after a step")
    note = (
        f"local error over {len(local.values[0])} rows of the denoiser's batches; with guidance a "
        "prompt has two"
    )
    if divergence is None:
        return Timesteps(None, local, f"{note}; the latents are too large to be kept and compared")
    return Timesteps(
        divergence, local, f"divergence over {len(divergence.values[0])} prompts, {note}"
    )
