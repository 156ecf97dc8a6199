"""Recovering quality: training a denoiser of fewer bits or weights on the dense one's outputs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import Packed
from quantkit.errors import ArtefactError, CheckpointError
from quantkit.models.layer_plan import dense_reason
from quantkit.models.source import Component
from quantkit.numerics.masks import parse_pattern
from quantkit.progress import Progress, Tell, silent, unheard
from quantkit.recipe.recommended import DEFAULT
from quantkit.recipe.schema import Recipe
from quantkit.recovery.distill.distillation import packed_denoiser
from quantkit.recovery.recovered_model import refuse_outputs
from quantkit.sparsity.choose import choose_masks, sparse_layers
from quantkit.sparsity.maskfile import MaskSet
from quantkit.storage.files import scratch_directory
from quantkit.workflow.arguments import (
    HessiansLike,
    MasksLike,
    ModelLike,
    PromptsLike,
    RecipeLike,
    as_masks,
    as_path,
    opened,
    surgeon_of,
)
from quantkit.workflow.inspect import require_packed
from quantkit.workflow.recovery_job import RUN, Job
from quantkit.workflow.recovery_result import Recovery, RecoveryPlan
from quantkit.workflow.recovery_settings import Training, refuse_foreign
from quantkit.workflow.sparsify import Sparsified
from quantkit.workflow.verify import find_breaches

__all__ = ["Recovery", "RecoveryPlan", "Tell", "Training", "recover", "unheard"]


def recover(
    model: ModelLike,
    *,
    output: str | Path,
    method: str = "distill",
    recipe: RecipeLike = DEFAULT,
    masks: MasksLike | None = None,
    packed: str | Path | None = None,
    hessians: HessiansLike | None = None,
    prompts: PromptsLike | None = None,
    training: Training = Training(),  # noqa: B008  frozen
    masks_output: str | Path | None = None,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    commands: Sequence[str] = (),
    progress: Progress = silent,
    tell: Tell = unheard,
) -> Recovery | Any:
    """Make up for what masks, or packing, cost the pictures of a pipeline.

    distill trains the denoiser on what the dense one answers along its own trajectories: masked in
    16 bit, or packed, where codes, scales, biases and norms are trained. obs trains nothing: kept
    weights and biases make up for the dropped ones. No data set is needed.

    Args:
        model: the dense pipeline: its directory, a hub id, or opened.
        output: the directory to make: an ordinary 16-bit pipeline, or a packed one as ``packed``.
        method: distill or obs.
        recipe: its calibration section says how pictures are sampled, and with obs its sparsity
            section which masks are chosen.
        masks: which weights are kept; None: with obs what the recipe's sparsity section chooses,
            each layer computed once for its mask and its weights.
        packed: a directory of ``pack``, of this model or of one that was recovered from it; it is
            trained, with its own masks, in place of a 16-bit pipeline.
        hessians: second moments of the model, which obs computes with.
        prompts: texts, or a file with one a line; None: the bundled set.
        training: how long, how fast and on what.
        masks_output: where the masks for the output go; None: ``OUTPUT.masks.safetensors``.
        device: auto, cpu or cuda[:N].
        force: replace existing outputs, and a saved training.
        dry_run: say how many layers are masked or packed, and train nothing.
        commands: what a reader types to make it again.
        progress: told of percents of the training, or of layers.
        tell: told a line about every loss or look.

    Returns:
        how it went, or with ``dry_run`` a ``RecoveryPlan``; None in all but the first of several
        processes.

    Raises:
        InputError: a model, masks, a packed model, second moments, prompts or settings that cannot
            be used, or an output that exists.
        NonFiniteError: the loss became NaN or Inf.
        QuantkitError: out of GPU memory.
    """
    source, chosen = opened(model, recipe)
    mask_set = as_masks(masks)
    refuse_foreign(method, training)
    codes = None if packed is None else require_packed(packed)
    if dry_run:
        return _plan(source.components[0], chosen, mask_set, codes, method)
    _refuse_inputs(method, hessians, prompts, codes)
    # Damage would be trained, and get new checksums.
    for breach in () if codes is None else find_breaches(codes.path, stop_at_first=True).breaches:
        raise CheckpointError(breach)
    job = Job(
        source,
        chosen,
        mask_set,
        codes,
        None,
        prompts,
        training,
        Path(output),
        as_path(masks_output),
        device,
        force,
        progress,
        tell,
        tuple(commands),
    )
    if method == "obs" and mask_set is None and chosen.sparsity is not None:
        return _choose_and_update(job, hessians)
    return RUN[method](replace(job, surgeon=surgeon_of(hessians, device)))


def _choose_and_update(job: Job, hessians: HessiansLike | None) -> Recovery | None:
    """Choose masks and update the weights; results of choosing a mask are reused."""
    job.recipe.refuse_budget()
    refuse_outputs(job.model, job.output, job.masks_path, force=job.force)
    with scratch_directory(job.output) as scratch:
        surgeon = surgeon_of(hessians, job.device, scratch)
        masks = choose_masks(
            job.model, job.recipe, None, surgeon=surgeon, update=True, progress=job.progress
        )
        recovery = RUN["obs"](replace(job, masks=masks, surgeon=surgeon))
    return recovery and replace(recovery, chosen=Sparsified(masks, job.output))


def _plan(
    component: Component, recipe: Recipe, masks: MaskSet | None, packed: Packed | None, method: str
) -> RecoveryPlan:
    found = packed_denoiser(packed, component)
    layers = () if found is None else found.config.layers
    return RecoveryPlan(len(_kept(component, recipe, masks, method)), len(layers))


def _kept(component: Component, recipe: Recipe, masks: MaskSet | None, method: str) -> set[str]:
    """Return the layers that are masked, or that the recipe's sparsity section may mask."""
    if masks is not None:
        return set(masks.of(component))
    if method == "obs" and recipe.sparsity is not None:
        pattern = parse_pattern(recipe.sparsity.pattern)
        expected = sparse_layers(component, recipe)
        return {layer.name for layer in expected if dense_reason(layer, pattern) is None}
    return set()


def _refuse_inputs(
    method: str,
    hessians: HessiansLike | None,
    prompts: PromptsLike | None,
    packed: Packed | None,
) -> None:
    """Refuse inputs that a method does not read, and require those that it does."""
    if method == "obs" and hessians is None:
        raise ArtefactError(
            "hessians: missing, and method obs needs second moments; give those of 'quantkit "
            "calibrate hessian'",
            fields=("hessians",),
        )
    if method == "obs" and prompts is not None:
        raise ArtefactError(
            "prompts: method obs does not use them; drop them",
            fields=("prompts",),
        )
    if method == "obs" and packed is not None:
        raise ArtefactError(
            "packed: method obs changes 16-bit weights; drop it, or train with method distill",
            fields=("packed",),
        )
    if method == "distill" and hessians is not None:
        raise ArtefactError(
            "hessians: method distill does not use them; drop them",
            fields=("hessians",),
        )
