"""One evaluation from two directories to the finished result. Writing it is in report.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__, load_pipeline
from quantkit.calibration.running import choose_dtype, quiet_libraries
from quantkit.calibration.running import load_pipeline as load_original
from quantkit.checkpoint.reader import Packed, open_packed
from quantkit.device import log
from quantkit.errors import ModelError
from quantkit.inference.deviation import LayerDeviation, watch
from quantkit.inference.layers import packed_layers
from quantkit.models.source import Model, open_model
from quantkit.progress import Progress, silent

from .backbones import Backbones
from .comparison import compare
from .facts import (
    describe_environment,
    kernel_facts,
    original_facts,
    packed_facts,
    run_facts,
    warn,
)
from .gates import Limits, find_compression, judge
from .generation import Generated, Settings, generate
from .images import Pairs
from .layers import Place, layer_rows
from .result import Report

#: Steps and prompts that are computed again on reference: every layer, early and late noise.
WATCHED_STEPS = 2
WATCHED_PROMPTS = 1


@dataclass(frozen=True)
class Pair:
    """Original and packed directory, both opened and checked."""

    #: the original as the user wrote it: a path or a hub id
    name: str
    model: Model
    packed: Packed


def require_pipeline(model: str) -> Model:
    """Open a pipeline directory or hub id.

    Raises:
        ModelError: no pipeline: a component alone makes no pictures.
    """
    opened = open_model(model)
    if not opened.is_pipeline:
        raise ModelError(
            f"{model}: a component alone makes no pictures; wanted the directory of the pipeline"
        )
    return opened


def open_pair(model: str, packed: Path) -> Pair:
    """Open both directories.

    Raises:
        ModelError: MODEL is no pipeline: a component alone makes no pictures.
        CheckpointError: PACKED is not a packed pipeline, or breaks a rule of FORMAT.md.
    """
    opened = require_pipeline(model)
    found = open_packed(packed)
    names = {component.name for component in opened.components}
    for component in found.components:
        if component.name not in names:
            raise ModelError(
                f"{packed}: packed {component.name or 'component alone'}, but {model} has "
                f"{', '.join(sorted(names))}; pass the two directories of one pipeline"
            )
    return Pair(model, opened, found)


@quiet_libraries()
def evaluate(
    pair: Pair,
    settings: Settings,
    *,
    backbones: Backbones,
    limits: Limits,
    device: torch.device,
    title: str | None = None,
    original: Generated | None = None,
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> tuple[Report, Pairs]:
    """Run both pipelines, measure, and return the result with its pictures.

    Args:
        pair: what ``open_pair`` returned.
        settings: given to both pipelines alike.
        backbones: the networks of LPIPS and CLIP score.
        limits: the gates' limits.
        device: where both pipelines run.
        title: the report's heading; by default the two names.
        original: pictures of the original under the same settings, made before.
        commands: what a reader types to make the report again.
        progress: told about every step.

    Raises:
        NonFiniteError: a picture holds NaN or Inf.
    """
    dtype = choose_dtype(pair.model, device)
    pipe = load_pipeline(pair.packed.path, torch_dtype=dtype, device=device)
    dense = load_original(pair.model, device)
    if original is None:
        original = generate(dense, settings, label="original", progress=progress)
    with log.record() as calls:
        packed = generate(pipe, settings, label="packed", progress=progress)
    deviations = _watch(pipe, dense, settings, progress)
    infos = {(info.component, info.name): info for info in packed_layers(pipe)}
    names = tuple(f"{index:03d}" for index in range(len(settings.prompts)))
    pairs = Pairs(names, original.pictures, packed.pictures, settings.prompts)
    comparison = compare(pairs, backbones, progress=progress)
    schemes = {entry.scheme for c in pair.packed.components for entry in c.config.schemes}
    compression = find_compression(schemes)
    report = Report(
        title=title or f"{pair.packed.path.name} against {Path(pair.name).name}",
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        quantkit_version=__version__,
        compression=compression,
        original=original_facts(pair.name, pair.model, pair.packed),
        packed=packed_facts(pair.packed),
        run=run_facts(settings, device, dtype, original=original, packed=packed, calls=calls),
        comparison=comparison,
        gates=judge(comparison, limits, compression),
        kernels=kernel_facts(calls, deviations),
        layers=layer_rows(pair.model, pair.packed, infos, deviations, progress),
        environment=describe_environment(device),
        commands=tuple(commands),
    )
    return replace(report, warnings=warn(pair.model, pair.packed, report)), pairs


def _watch(
    pipe: Any, dense: Any, settings: Settings, progress: Progress
) -> dict[Place, LayerDeviation]:
    few = replace(
        settings,
        prompts=settings.prompts[:WATCHED_PROMPTS],
        seeds=settings.seeds[:WATCHED_PROMPTS],
        steps=min(WATCHED_STEPS, settings.steps),
    )
    with watch(pipe, dense=dense) as deviations:
        generate(pipe, few, label="kernels against reference", progress=progress)
    return deviations.layers
