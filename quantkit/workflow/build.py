"""From a pipeline to a packed directory in one call: calibrate, sparsify, pack."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from quantkit.calibration.moments.collect_hessians import collect_hessians
from quantkit.calibration.moments.moment_files import Hessians
from quantkit.calibration.observing.collect import calibrate
from quantkit.calibration.statistics.layer_statistics import load_calibration, save_calibration
from quantkit.errors import ModelError, RecipeError
from quantkit.models.source import Model
from quantkit.packing.pack_model import moments_for, pack
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.analyse import measure_sensitivity
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sensitivity.recipe_writer import save_recipe
from quantkit.sensitivity.selection import choose
from quantkit.sensitivity.sensitivity_file import save_sensitivity
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import load_masks, save_masks
from quantkit.sparsity.sparsegpt import Surgeon
from quantkit.storage.digest import sha256_of_file
from quantkit.workflow.sensitivity import MEASURED

CALIBRATION = "calibration.safetensors"
SENSITIVITY = "sensitivity.json"
CHOSEN = "chosen.yaml"
MASKS = "masks.safetensors"
HESSIANS = "hessians"
#: Bytes of matrices that are held at a time: a quarter of what a laptop has.
HESSIAN_MEMORY = 4 * 2**30
PACKED = "packed"
Artefact = TypeVar("Artefact")


def refuse_search(recipe: Recipe) -> None:
    """Refuse a budget that a build cannot choose within.

    Raises:
        RecipeError: one of ssim, which makes pictures of its own, or one without a goal.
    """
    budget = recipe.budget
    if budget is not None and (budget.ssim is not None or not budget.goals):
        raise RecipeError(
            f"recipe {recipe.name}: budget {'ssim' if budget.goals else 'without a goal'}, "
            "expected bytes, error or speed; or run 'quantkit calibrate optimize' and pack what it "
            "writes"
        )


def build(
    model: Model,
    recipe: Recipe,
    output: Path,
    *,
    prompts: Sequence[str],
    device: str,
    threads: int,
    force: bool,
    resume: bool,
    progress: Progress,
) -> None:
    """Write the artefacts that the recipe asks for into ``output``.

    Args:
        model: the original.
        recipe: what to do.
        output: the folder that gets calibration.safetensors, sensitivity.json and chosen.yaml of a
            recipe with a budget, masks.safetensors and packed/.
        prompts: what to calibrate on; used when the recipe needs it.
        device: auto, cpu or cuda[:N], for calibration.
        threads: for packing.
        force: replace artefacts that exist.
        resume: take those that exist, which are complete, instead of making them again.
        progress: told about every step.

    Raises:
        InputError: as the three steps do.
    """
    if resume and (output / PACKED).exists():
        return
    calibration, masks = None, None
    refuse_search(recipe)
    if (recipe.needs_calibration or recipe.needs_hessians) and not model.is_pipeline:
        raise ModelError(
            f"{model.path}: recipe {recipe.name} needs a calibration, and a component alone "
            "cannot be run; pass the pipeline's directory"
        )
    if recipe.needs_calibration:
        calibration = _there(output / CALIBRATION, load_calibration, resume=resume)
    if recipe.needs_calibration and calibration is None:
        calibration = calibrate(model, recipe, prompts, device=device, progress=progress)
        save_calibration(calibration, output / CALIBRATION, force=force)
    hessians = _hessians(model, recipe, output, prompts, device=device, progress=progress)
    own_moments = moments_for(model.components, hessians, needed=recipe.denoisers_need_hessians)
    surgeon = None if own_moments is None else Surgeon(own_moments, choose_device(device))
    chosen = _there(output / CHOSEN, load_recipe, resume=resume)
    if chosen is not None and recipe.budget is not None:
        recipe = chosen
    elif recipe.budget is not None:
        assert calibration is not None
        subject = MeasuredModel.of(model, recipe, calibration, surgeon)
        recipe = adapt(
            subject, output, prompts=prompts, device=device, force=force, progress=progress
        )
    if recipe.sparsity is not None:
        masks = _there(output / MASKS, load_masks, resume=resume)
    if recipe.sparsity is not None and masks is None:
        masks = choose_masks(
            model,
            recipe,
            calibration,
            surgeon=surgeon,
            update=recipe.weight.rounding == "gptq",
            progress=progress,
        )
        save_masks(masks, output / MASKS, force=force)
    pack(
        model,
        recipe,
        output / PACKED,
        calibration=calibration,
        masks=masks,
        hessians=hessians,
        threads=threads,
        force=force,
        progress=progress,
    )


def _there(path: Path, load: Callable[[Path], Artefact], *, resume: bool) -> Artefact | None:
    """Return the artefact of an earlier run that is resumed."""
    return load(path) if resume and path.exists() else None


def _hessians(
    model: Model,
    recipe: Recipe,
    output: Path,
    prompts: Sequence[str],
    *,
    device: str,
    progress: Progress,
) -> Hessians | None:
    """Return the second moments of a recipe that needs them; existing ones are reused."""
    if not recipe.needs_hessians:
        return None
    return collect_hessians(
        model,
        recipe,
        prompts,
        output / HESSIANS,
        memory=HESSIAN_MEMORY,
        device=device,
        progress=progress,
    )


def adapt(
    subject: MeasuredModel,
    output: Path,
    *,
    prompts: Sequence[str],
    device: str,
    force: bool,
    progress: Progress,
) -> Recipe:
    """Return the recipe that meets the subject's own budget; write it and the sensitivity.

    Raises:
        RecipeError: a budget that cannot be met.
    """
    recipe = subject.recipe
    assert recipe.budget is not None
    found = measure_sensitivity(
        subject,
        prompts[: recipe.calibration.batch],
        measure=MEASURED,
        device=device,
        calibration_digest=sha256_of_file(output / CALIBRATION),
        keep=partial(save_sensitivity, path=output / SENSITIVITY, force=force),
        progress=progress,
    )
    save_sensitivity(found, output / SENSITIVITY, force=True)
    chosen = choose(found, recipe, recipe.budget)
    save_recipe(chosen.recipe, chosen.remarks, output / CHOSEN, force=force)
    return chosen.recipe
