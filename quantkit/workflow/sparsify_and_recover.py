"""Choosing masks and recovering in one go."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from quantkit.progress import Progress, Tell, silent, unheard
from quantkit.recovery.recovered_model import refuse_outputs
from quantkit.sparsity.choose import choose_masks
from quantkit.storage.files import scratch_directory
from quantkit.workflow.inputs import (
    CalibrationLike,
    HessiansLike,
    ModelLike,
    PromptsLike,
    RecipeLike,
    as_calibration,
    as_path,
    opened,
    surgeon_of,
    with_rule,
)
from quantkit.workflow.recovery_job import RUN, Job
from quantkit.workflow.recovery_result import Recovery
from quantkit.workflow.sparsify import Sparsified
from quantkit.workflow.training import Training, refuse_foreign


def sparsify_and_recover(
    model: ModelLike,
    *,
    output: str | Path,
    method: str = "distill",
    recipe: RecipeLike | None = None,
    calibration: CalibrationLike | None = None,
    hessians: HessiansLike | None = None,
    pattern: str | None = None,
    mask_method: str | None = None,
    error_budget: float | None = None,
    prompts: PromptsLike | None = None,
    training: Training = Training(),  # noqa: B008  frozen
    masks_output: str | Path | None = None,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    commands: Sequence[str] = (),
    progress: Progress = silent,
    tell: Tell = unheard,
) -> tuple[Sparsified, Recovery | None]:
    """Choose masks and recover at once; what obs settles for a mask is not computed again.

    Args:
        model: the dense pipeline: its directory, a hub id, or opened.
        output: the directory to make.
        method: of the recovery: distill, obs or reconstruct.
        recipe: as for ``sparsify`` and ``recover``.
        calibration: as for ``sparsify``.
        hessians: as for ``sparsify`` and ``recover``.
        pattern: as for ``sparsify``.
        mask_method: ``method`` of ``sparsify``.
        error_budget: as for ``sparsify``; with obs errors are those after it.
        prompts: as for ``recover``.
        training: as for ``recover``.
        masks_output: as for ``recover``.
        device: auto, cpu or cuda[:N].
        force: replace existing outputs.
        dry_run: choose masks, and write nothing.
        commands: what a reader types to make it again.
        progress: told of layers, and of the training.
        tell: told a line about every loss, look or block.

    Returns:
        the masks that were chosen, and how the recovery went: None after a dry run and in all but
        the first of several processes.

    Raises:
        InputError: as ``sparsify`` and ``recover``.
    """
    refuse_foreign(method, training)
    path = Path(output)
    source, chosen = opened(model, recipe)
    chosen = with_rule(chosen, pattern=pattern, method=mask_method, error_budget=error_budget)
    chosen.refuse_budget()
    statistics = as_calibration(calibration)
    where = as_path(masks_output) or path.with_name(f"{path.name}.masks.safetensors")
    refuse_outputs(source, path, where, force=force)
    update = method == "obs" or (method == "reconstruct" and hessians is not None)
    spooled = update and hessians is not None and not dry_run
    with scratch_directory(path) if spooled else nullcontext() as scratch:
        surgeon = surgeon_of(hessians, device, scratch)
        masks = choose_masks(
            source, chosen, statistics, surgeon=surgeon, update=update, progress=progress
        )
        if dry_run:
            return Sparsified(masks, None), None
        job = Job(
            source, chosen, masks, surgeon, prompts, training, path, where, device, force,
            progress, tell, tuple(commands),
        )  # fmt: skip
        return Sparsified(masks, path), RUN[method](job)
