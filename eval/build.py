"""From a pipeline to a packed directory in one call: calibrate, sparsify, pack."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibration.collect import calibrate
from quantkit.calibration.statistics import Calibration, save_calibration
from quantkit.errors import ModelError
from quantkit.models.source import Model
from quantkit.pipeline import PackSummary, pack
from quantkit.progress import Progress
from quantkit.recipe import Recipe
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import MaskSet, save_masks

CALIBRATION = "calibration.safetensors"
MASKS = "masks.safetensors"
PACKED = "packed"


@dataclass(frozen=True)
class Built:
    """The artefacts of one build; None for a step that the recipe does not ask for."""

    calibration: Calibration | None
    masks: MaskSet | None
    summary: PackSummary


def needs_calibration(recipe: Recipe) -> bool:
    """Return True when something in the recipe is chosen from activations."""
    activations = [recipe.activation, *(o.activation for o in recipe.overrides if o.activation)]
    rule = recipe.sparsity
    return (
        any(activation.mode == "static" for activation in activations)
        or recipe.smooth is not None
        or (rule is not None and (rule.method == "wanda" or rule.error_budget is not None))
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
        output: the folder that gets calibration.safetensors, masks.safetensors and packed/.
        prompts: what to calibrate on; used when the recipe needs it.
        device: auto, cpu or cuda[:N], for calibration.
        threads: for packing.
        force: replace artefacts that exist.
        progress: told about every step.

    Raises:
        InputError: as the three steps do.
    """
    calibration, masks = None, None
    if needs_calibration(recipe):
        if not model.is_pipeline:
            raise ModelError(
                f"{model.path}: recipe {recipe.name} wants a calibration, and a component alone "
                "cannot be run; pass the pipeline's directory"
            )
        calibration = calibrate(model, recipe, prompts, device=device, progress=progress)
        save_calibration(calibration, output / CALIBRATION, force=force)
    if recipe.sparsity is not None:
        masks = choose_masks(model, recipe, calibration, progress=progress)
        save_masks(masks, output / MASKS, force=force)
    summary = pack(
        model,
        recipe,
        output / PACKED,
        calibration=calibration,
        masks=masks,
        threads=threads,
        force=force,
        progress=progress,
    )
    return Built(calibration, masks, summary)
