"""Choosing a basis for the queries and keys of attention modules, and measuring what it is worth.

A basis goes into the weights of projections, so a module has one if its queries and keys are their
results and nothing else: no rotary embedding, no norm. Attention to a text keeps its own: it has
few keys, and adapters (IP-Adapter) bring theirs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from quantkit.calibration.attention_accumulators import attention_statistics_of
from quantkit.calibration.attention_observer import listening
from quantkit.calibration.attention_statistics import AttentionStatistics
from quantkit.calibration.column_errors import ColumnErrors
from quantkit.calibration.hooks import Collector
from quantkit.calibration.statistics import Calibration, CalibrationProvenance
from quantkit.errors import ArtefactError, ModelError, PromptError
from quantkit.models.attention import AttentionCall, Heads
from quantkit.models.source import Component, Model
from quantkit.models.source_tensors import source_tensors
from quantkit.numerics.attention_basis import Basis, basis_of, ranks_of, turned
from quantkit.pipelines.batches import split_batches
from quantkit.pipelines.running import (
    choose_device,
    load_pipeline,
    quiet_libraries,
    rehearse_prompts,
    run_batch,
)
from quantkit.progress import Progress
from quantkit.recipe.calibration import CalibrationRecipe

#: Errors on fewer prompts say too little of others.
LEAST_PROMPTS = 32
#: Projections of an attention module, those of joint streams last, by what they make.
_PROJECTIONS = {"query": ("to_q", "add_q_proj"), "key": ("to_k", "add_k_proj")}


@dataclass(frozen=True, eq=False)
class Rotation:
    """The bases of a denoiser's attention modules."""

    bases: Mapping[str, Basis]
    #: module -> why it has none
    left: Mapping[str, str]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the basis, (H, D, D) float64, of every projection, by its path."""
        return {
            f"{module}.{projection}": getattr(basis, side)
            for module, basis in self.bases.items()
            for side, projections in _PROJECTIONS.items()
            for projection in projections
        }


def plan_rotation(component: Component, calibration: Calibration) -> Rotation:
    """Return the bases of a component's attention modules.

    Raises:
        ArtefactError: the calibration has no attention, or another component's.
        ModelError: there is no module that can have one.
    """
    table = calibration.attention_of(component)
    if not table:
        raise ArtefactError(
            f"calibration: no attention of {component.name or component.class_name}; calibrate "
            "again with this quantkit",
            fields=("calibration",),
        )
    names = set(source_tensors(component))
    left = {name: reason for name, s in table.items() if (reason := _why_left(name, s, names))}
    bases = {name: _basis(s) for name, s in table.items() if name not in left}
    if not bases:
        reasons = ", ".join(sorted(set(left.values())))
        raise ModelError(
            f"{component.path}: no attention module can have another basis ({reasons}); pack the "
            "model as it is"
        )
    return Rotation(bases, left)


def _why_left(name: str, seen: AttentionStatistics, tensors: set[str]) -> str:
    """Return why a module keeps its own basis; empty if it gets one."""
    if seen.q_second is None:
        return "a rotary embedding or a norm follows the projections"
    if not int(seen.local_rows.sum()):
        return "attention to another sequence"
    if not ranks_of(seen.columns):
        return f"heads of {seen.columns} columns, which one matrix instruction multiplies"
    if not tensors >= {f"{name}.to_q.weight", f"{name}.to_k.weight"}:
        return "projections of other names"
    return ""


def _basis(seen: AttentionStatistics) -> Basis:
    assert seen.q_second is not None
    assert seen.k_second is not None
    return basis_of(seen.q_second, seen.k_second, seen.pooled().k_mean[0])


def held_out_prompts(
    texts: Sequence[str], about: CalibrationProvenance, count: int
) -> tuple[str, ...]:
    """Return prompts that a calibration was not taken from.

    Args:
        texts: if they begin with the calibration's, those after them are taken.
        about: the calibration.
        count: how many, at least 32.

    Raises:
        PromptError: there are fewer.
    """
    seen = hashlib.sha256("\n".join(texts[: about.prompts]).encode()).hexdigest()
    rest = texts[about.prompts :] if seen == about.prompts_digest else texts
    if count < LEAST_PROMPTS or len(rest) < count:
        found, field = (count, "count") if count < LEAST_PROMPTS else (len(rest), "prompts")
        raise PromptError(
            f"{found} prompts that the calibration was not taken from, wanted "
            f"{max(count, LEAST_PROMPTS)}: fewer say too little; give more",
            fields=(field,),
        )
    return tuple(rest[:count])


def turn(denoiser: nn.Module, rotation: Rotation) -> None:
    """Give the attention modules of a loaded denoiser their bases."""
    for path, basis in rotation.weights().items():
        owner, _, name = path.rpartition(".")
        layer = getattr(denoiser.get_submodule(owner), name, None)
        for parameter in () if layer is None else layer.parameters(recurse=False):
            parameter.data = turned(parameter.data.cpu(), basis).to(parameter)


def measure_rotation(
    model: Model,
    rotation: Rotation,
    calibration: Calibration,
    prompts: Sequence[str],
    *,
    batch: int,
    device: str,
    progress: Progress,
) -> dict[str, AttentionStatistics]:
    """Run the pipeline with its bases, and return the statistics of the modules that have one.

    They have errors of formats where the calibration has any.

    Args:
        model: a pipeline with one denoiser, as it was.
        rotation: of that.
        calibration: whose steps, guidance and buckets are taken.
        prompts: that it was not taken from; their noise follows on the calibration's.
        batch: prompts denoised at a time.
        device: auto, cpu or cuda[:N].
        progress: told of denoiser calls.

    Raises:
        ModelError: diffusers cannot load the pipeline.
        NonFiniteError: NaN or Inf in queries, keys or values.
    """
    about, edges = calibration.metadata, calibration.edges
    settings = CalibrationRecipe(
        prompts=len(prompts),
        steps=about.steps,
        guidance=about.guidance,
        seed=about.seed + about.prompts,
        buckets=len(edges) + 1,
        batch=batch,
    )
    (component,) = model.components
    with quiet_libraries(), ExitStack() as stack:
        pipe = load_pipeline(model, choose_device(device))
        inputs = rehearse_prompts(pipe, prompts, settings)
        denoiser = getattr(pipe, component.name)
        turn(denoiser, rotation)
        measured = any(s.format_errors() for s in calibration.attention_of(component).values())
        collector = Collector(
            component.name, denoiser, (), settings.buckets, errors_from=1 if measured else None
        )
        collector.put({}, {}, [0] * settings.buckets, edges)
        batches = split_batches(prompts, settings)
        total = len(batches) * settings.steps
        report = partial(_report, progress, total)
        stack.enter_context(collector.attached(pipe.scheduler, report))
        errors: dict[str, ColumnErrors] = {}
        modules = {name: denoiser.get_submodule(name) for name in rotation.bases}
        stack.enter_context(listening(modules, partial(_add, errors)))
        for part in batches:
            collector.begin_batch(part.seeds, part.sizes)
            run_batch(pipe, part, settings, inputs)
            collector.check()
        collector.refuse_empty()
        sums = collector.taken_attention()
    return {
        name: replace(attention_statistics_of(sums[name]), **found.taken(len(prompts)))
        for name, found in errors.items()
    }


def _report(progress: Progress, total: int, calls: int) -> None:
    progress("denoising", min(calls, total), total)


def _add(errors: dict[str, ColumnErrors], module: str, heads: Heads, call: AttentionCall) -> None:
    if module not in errors:
        errors[module] = ColumnErrors(heads.q.shape[1], heads.q.shape[3], heads.q.device)
    errors[module].add(heads, call.scale)
