"""Packing a model, and a forecast of what packing would write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.models.recipe_check import refuse_unmatched_others
from quantkit.packing import dry_run as forecasts
from quantkit.packing import pack_model as packing
from quantkit.packing.dry_run import Forecast
from quantkit.packing.summary import PackSummary
from quantkit.progress import Progress, silent
from quantkit.recipe.recommended import DEFAULT
from quantkit.storage.places import check_directory, refuse_overlap
from quantkit.storage.system import cores
from quantkit.workflow.arguments import (
    CalibrationLike,
    HessiansLike,
    MasksLike,
    ModelLike,
    RecipeLike,
    as_calibration,
    as_hessians,
    as_masks,
    name_of,
    opened,
)

if TYPE_CHECKING:
    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration
    from quantkit.models.source import Model
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import MaskSet

__all__ = ["Forecast", "PackSummary", "pack", "usual_threads"]

#: Beyond this, the disk and the memory bus are busy, and each thread costs 10 MB of buffers.
MOST_THREADS = 8


def pack(
    model: ModelLike,
    *,
    output: str | Path,
    recipe: RecipeLike = DEFAULT,
    calibration: CalibrationLike | None = None,
    masks: MasksLike | None = None,
    hessians: HessiansLike | None = None,
    threads: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> PackSummary | Any:
    """Write the packed checkpoint of a model: all of it, or nothing.

    Linear and Conv2d weights of the denoiser become codes, 2:4 sparse where the recipe says so, and
    those of text encoders where it is asked for; everything else is copied byte for byte.

    Args:
        model: a pipeline's or component's directory, a hub id, or opened.
        output: the directory to make.
        recipe: a bundled name, a YAML file, or opened.
        calibration: statistics of the model; None: weights are scaled from the weights alone.
        masks: of the model; None: the recipe's sparsity section decides.
        hessians: second moments of the model, for GPTQ rounding and SparseGPT masks.
        threads: tensors in work at once; None: the cores, at most 8. The bytes do not depend on it.
        force: replace an existing output once the new one is complete.
        dry_run: say what would be written; a calibration or second moments may still be missing.
        progress: told of tensors done.

    Returns:
        what became of every layer; with ``dry_run``, where something that the recipe needs is
        missing, a ``Forecast`` of all that does not depend on it.

    Raises:
        InputError: anything that is wrong with the input; ``output`` is as it was.
    """
    source, chosen = _opened(model, recipe, Path(output), force=force)
    task = _PackInputs.of(source, chosen, calibration, masks, hessians)
    if dry_run:
        return _forecast(task, Path(output), progress)
    return packing.pack(
        task.model,
        task.recipe,
        Path(output),
        calibration=task.calibration,
        masks=task.masks,
        hessians=task.hessians,
        threads=usual_threads() if threads is None else threads,
        force=force,
        progress=progress,
    )


def _forecast(task: _PackInputs, output: Path, progress: Progress) -> PackSummary | Forecast:
    """Return the output of packing, without layers that a missing artefact decides."""
    missing = forecasts.missing_artefacts(
        task.recipe, calibration=task.calibration, masks=task.masks, hessians=task.hessians
    )
    if missing:
        return forecasts.forecast_pack(
            task.model, task.recipe, output, missing=missing, masks=task.masks
        )
    plan = packing.plan_pack(
        task.model,
        task.recipe,
        calibration=task.calibration,
        masks=task.masks,
        hessians=task.hessians,
        progress=progress,
    )
    return packing.summarize(plan, output)


def _opened(
    model: ModelLike, recipe: RecipeLike, output: Path, *, force: bool
) -> tuple[Model, Recipe]:
    """Return model and recipe; refuse an output that could not be written."""
    source, chosen = opened(model, recipe)
    refuse_unmatched_others(chosen, name_of(recipe), source)
    refuse_overlap(output, source.path)
    check_directory(output, kind=packing.KIND, force=force)
    return source, chosen


def usual_threads() -> int:
    """Return the default number of tensors to pack in parallel."""
    return min(cores(), MOST_THREADS)


@dataclass(frozen=True, eq=False)
class _PackInputs:
    """The opened inputs of packing."""

    model: Model
    recipe: Recipe
    calibration: Calibration | None
    masks: MaskSet | None
    hessians: Hessians | None

    @classmethod
    def of(
        cls,
        model: Model,
        recipe: Recipe,
        calibration: CalibrationLike | None,
        masks: MasksLike | None,
        hessians: HessiansLike | None,
    ) -> _PackInputs:
        statistics, moments = as_calibration(calibration), as_hessians(hessians)
        return cls(model, recipe, statistics, as_masks(masks), moments)
