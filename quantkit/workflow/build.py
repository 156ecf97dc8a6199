"""From a pipeline to a packed directory in one call: calibrate, sparsify, pack."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibration.collect import calibrate
from quantkit.calibration.collect_hessians import collect_hessians
from quantkit.calibration.hessian import Hessians
from quantkit.calibration.statistics import Calibration, save_calibration
from quantkit.errors import ModelError, RecipeError
from quantkit.models.source import Model
from quantkit.packing.pack import pack
from quantkit.packing.summary import PackSummary
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.analyse import measure_sensitivity
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sensitivity.recipe_writer import save_recipe
from quantkit.sensitivity.result import save_sensitivity
from quantkit.sensitivity.selection import choose
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import MaskSet, save_masks
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


@dataclass(frozen=True)
class Built:
    """The artefacts of one build; None for a step that the recipe does not ask for."""

    calibration: Calibration | None
    masks: MaskSet | None
    summary: PackSummary


def refuse_search(recipe: Recipe) -> None:
    """Refuse a budget that a build cannot choose within.

    Raises:
        RecipeError: one of ssim, which makes pictures of its own, or one without a goal.
    """
    budget = recipe.budget
    if budget is not None and (budget.ssim is not None or not budget.goals):
        raise RecipeError(
            f"recipe {recipe.name}: budget {'ssim' if budget.goals else 'without a goal'}, wanted "
            "bytes, error or speed; or run 'quantkit calibrate optimize' and pack what it writes"
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
    progress: Progress,
) -> Built:
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
        progress: told about every step.

    Raises:
        InputError: as the three steps do.
    """
    calibration, masks = None, None
    refuse_search(recipe)
    if (recipe.needs_calibration or recipe.needs_hessians) and not model.is_pipeline:
        raise ModelError(
            f"{model.path}: recipe {recipe.name} wants a calibration, and a component alone "
            "cannot be run; pass the pipeline's directory"
        )
    if recipe.needs_calibration:
        calibration = calibrate(model, recipe, prompts, device=device, progress=progress)
        save_calibration(calibration, output / CALIBRATION, force=force)
    hessians = _hessians(model, recipe, output, prompts, device=device, progress=progress)
    surgeon = None if hessians is None else Surgeon(hessians, choose_device(device))
    if recipe.budget is not None:
        assert calibration is not None
        subject = MeasuredModel.of(model, recipe, calibration, surgeon)
        recipe = adapt(
            subject, output, prompts=prompts, device=device, force=force, progress=progress
        )
    if recipe.sparsity is not None:
        masks = choose_masks(
            model,
            recipe,
            calibration,
            surgeon=surgeon,
            update=recipe.weight.rounding == "gptq",
            progress=progress,
        )
        save_masks(masks, output / MASKS, force=force)
    summary = pack(
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
    return Built(calibration, masks, summary)


def _hessians(
    model: Model,
    recipe: Recipe,
    output: Path,
    prompts: Sequence[str],
    *,
    device: str,
    progress: Progress,
) -> Hessians | None:
    """Return the second moments of a recipe that needs them; what is there is not taken again."""
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
        progress=progress,
    )
    save_sensitivity(found, output / SENSITIVITY, force=force)
    chosen = choose(found, recipe, recipe.budget)
    save_recipe(chosen.recipe, chosen.remarks, output / CHOSEN, force=force)
    return chosen.recipe
