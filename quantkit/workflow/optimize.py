"""Choosing a treatment for every layer within a budget, as a recipe."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from quantkit.errors import RecipeError
from quantkit.eval.measuring.generation import GenerationSettings, choose_prompts, make_settings
from quantkit.models.families import find_family
from quantkit.models.recommended import tuned
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, silent
from quantkit.recipe.goals import GOALS, BudgetRecipe
from quantkit.recipe.recommended import DEFAULT
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity import selection
from quantkit.sensitivity.budget import make_problems
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sensitivity.recipe_writer import save_recipe
from quantkit.sensitivity.selection import Selection
from quantkit.sensitivity.sensitivity_file import Sensitivity, load_sensitivity
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import check_file
from quantkit.workflow.arguments import (
    CalibrationLike,
    HessiansLike,
    ModelLike,
    RecipeLike,
    as_calibration,
    as_model,
    as_path,
    as_recipe,
    surgeon_of,
)
from quantkit.workflow.search import Trial, search_ssim
from quantkit.workflow.sensitivity import MeasuredSensitivity

SensitivityLike: TypeAlias = str | Path | Sensitivity | MeasuredSensitivity


#: Pictures of a goal of SSIM: they are made again for every trial.
_FEW = 8


@dataclass(frozen=True)
class _Pictures:
    """The inputs of pictures for a goal of SSIM."""

    model: ModelLike
    calibration: CalibrationLike
    hessians: HessiansLike | None
    prompts: Path | None
    count: int
    device: str


@dataclass(frozen=True, eq=False)
class Optimized:
    """The chosen recipe, with figures and reasons."""

    chosen: Selection
    #: of a search by SSIM, in their order
    trials: tuple[Trial, ...]
    #: the recipe's file; None: not written
    output: Path | None

    @property
    def recipe(self) -> Recipe:
        """The recipe, for ``sparsify`` and ``pack``."""
        return self.chosen.recipe

    def __repr__(self) -> str:
        """Return what came of the budget, in two lines."""
        return f"{self.chosen.summary}\nwritten: {self.output or 'nothing'}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, every layer's reason included."""
        trials = [
            {"error": t.assignment.error, "size": t.assignment.size, "ssim": t.ssim}
            for t in self.trials
        ]
        written = None if self.output is None else str(self.output)
        return {"written": written, "trials": trials, **selection.to_json(self.chosen)}


def optimize(
    sensitivity: SensitivityLike,
    *,
    recipe: RecipeLike = DEFAULT,
    output: str | Path | None = None,
    model: ModelLike | None = None,
    calibration: CalibrationLike | None = None,
    hessians: HessiansLike | None = None,
    prompts: str | Path | None = None,
    count: int = _FEW,
    device: str = "auto",
    force: bool = False,
    progress: Progress = silent,
) -> Optimized:
    """Choose a treatment for every layer within the recipe's budget.

    A goal of SSIM makes pictures of a model, for which alone the arguments from ``model`` to
    ``device`` are.

    Args:
        sensitivity: what ``measure_sensitivity`` found, or its file.
        recipe: what the chosen recipe starts from; its budget section is the goal.
        output: the recipe to write, a YAML file; None: nothing is written.
        model: the pipeline.
        calibration: statistics of the model.
        hessians: second moments of the model; None: no masks by SparseGPT.
        prompts: a file with one prompt a line; None: the bundled set.
        count: pictures of every trial.
        device: auto, cpu or cuda[:N].
        force: replace an existing file.
        progress: told of the pictures' denoising steps.

    Returns:
        the recipe, with the reason for every layer.

    Raises:
        ArtefactError: not a sensitivity.
        InputError: a goal of SSIM without model or calibration.
        RecipeError: no budget, or one that cannot be met.
    """
    path = as_path(output)
    if path is not None:
        check_file(path, force=force)
    measured = _opened(sensitivity)
    base = tuned(as_recipe(recipe), find_family("", measured.family))
    budget = _budget(base)
    trials: tuple[Trial, ...] = ()
    if budget.ssim is None:
        chosen = selection.choose(measured, base, budget)
    elif model is None or calibration is None:
        raise RecipeError(
            "budget ssim: pictures have to be made for it; give a model and a calibration too",
            fields=("model", "calibration"),
        )
    else:
        pictures = _Pictures(model, calibration, hessians, as_path(prompts), count, device)
        chosen, trials = _search(measured, base, budget, pictures, progress)
    if path is not None:
        write_or_keep(partial(save_recipe, chosen.recipe, chosen.remarks, force=force), path)
    return Optimized(chosen, trials, path)


def _opened(sensitivity: SensitivityLike) -> Sensitivity:
    if isinstance(sensitivity, MeasuredSensitivity):
        return sensitivity.sensitivity
    if isinstance(sensitivity, Sensitivity):
        return sensitivity
    return load_sensitivity(Path(sensitivity))


def _budget(recipe: Recipe) -> BudgetRecipe:
    if recipe.budget is None or not recipe.budget.goals:
        raise RecipeError(
            f"recipe {recipe.name}: no budget; set its bytes, error, speed or ssim",
            fields=tuple(f"budget.{goal}" for goal in GOALS),
        )
    return recipe.budget


def _search(
    measured: Sensitivity,
    base: Recipe,
    budget: BudgetRecipe,
    pictures: _Pictures,
    progress: Progress,
) -> tuple[Selection, tuple[Trial, ...]]:
    """Return the choice whose pictures keep the SSIM, and the trials on the way."""
    calibration = as_calibration(pictures.calibration)
    assert budget.ssim is not None
    assert calibration is not None
    device = choose_device(pictures.device)
    subject = MeasuredModel.of(
        as_model(pictures.model),
        measured.recipe,
        calibration,
        surgeon_of(pictures.hessians, pictures.device),
    )
    subject.refuse_others(measured)
    settings = _settings(measured, pictures, device)
    found = search_ssim(
        subject,
        make_problems(measured, base, budget.treatments),
        settings,
        least=budget.ssim,
        device=device,
        progress=progress,
    )
    count = len(settings.prompts)
    remark = f", SSIM {found.best.ssim:.4f} on the {count} pictures of the search"
    described = selection.describe(measured, base, budget, found.best.assignment, remark=remark)
    return described, found.trials


def _settings(
    measured: Sensitivity, pictures: _Pictures, device: torch.device
) -> GenerationSettings:
    section = measured.recipe.calibration
    return make_settings(
        choose_prompts(pictures.prompts, pictures.count, device=device, last=True),
        steps=section.steps,
        guidance=section.guidance,
        seed=section.seed,
        batch=section.batch,
    )
