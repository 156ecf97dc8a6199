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
from quantkit.recipe.fields import section_of
from quantkit.recipe.goals import GOALS, BudgetRecipe
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
    Sampling,
    as_calibration,
    as_model,
    as_path,
    as_recipe,
    surgeon_of,
)
from quantkit.workflow.search import Trial, search_ssim
from quantkit.workflow.sensitivity import MeasuredSensitivity

SensitivityLike: TypeAlias = str | Path | Sensitivity | MeasuredSensitivity


@dataclass(frozen=True)
class Budget:
    """One goal that the chosen treatments must meet; none: the recipe's budget section."""

    #: largest packed size, as a share of the source's
    bytes: float | None = None
    #: largest predicted relative error (NMSE) of the final latents
    error: float | None = None
    #: least modelled speed-up
    speed: float | None = None
    #: least mean SSIM of pictures, which are made
    ssim: float | None = None
    #: globs of the treatments to choose among, besides 16-bit; empty: the recipe's
    treatments: tuple[str, ...] = ()


#: They are made again for every trial.
_FEW = Sampling(count=8)


@dataclass(frozen=True)
class Pictures:
    """What a goal of SSIM makes pictures with."""

    model: ModelLike
    #: statistics of the model
    calibration: CalibrationLike
    #: second moments of the model; None: no masks by SparseGPT
    hessians: HessiansLike | None = None
    #: a file with one prompt a line; None: the bundled set
    prompts: Path | None = None
    #: how many are made for every trial (8), in how many steps and from which noise
    sampling: Sampling = _FEW
    #: auto, cpu or cuda[:N]
    device: str = "auto"


@dataclass(frozen=True, eq=False)
class Optimized:
    """The chosen recipe, and what led to it."""

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
    recipe: RecipeLike = "fp8",
    output: str | Path | None = None,
    budget: Budget = Budget(),
    pictures: Pictures | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Optimized:
    """Choose a treatment for every layer within one budget.

    Args:
        sensitivity: what ``measure_sensitivity`` found, or its file.
        recipe: what the chosen recipe starts from.
        output: the recipe to write, a YAML file; None: nothing is written.
        budget: the goal; one without goals leaves the recipe's.
        pictures: model and calibration; wanted by a goal of SSIM and read by no other.
        force: replace an existing file.
        progress: told of the pictures' denoising steps.

    Returns:
        the recipe, with the reason for every layer.

    Raises:
        ArtefactError: not a sensitivity.
        InputError: a goal of SSIM without ``pictures``.
        RecipeError: no budget, or one that cannot be met.
    """
    path = as_path(output)
    if path is not None:
        check_file(path, force=force)
    measured = _opened(sensitivity)
    base = tuned(as_recipe(recipe), find_family("", measured.family))
    wanted = _budget(base, budget)
    trials: tuple[Trial, ...] = ()
    if wanted.ssim is None:
        chosen = selection.choose(measured, base, wanted)
    else:
        chosen, trials = _search(measured, base, wanted, pictures, progress)
    if path is not None:
        write_or_keep(partial(save_recipe, chosen.recipe, chosen.remarks, force=force), path)
    return Optimized(chosen, trials, path)


def _opened(sensitivity: SensitivityLike) -> Sensitivity:
    if isinstance(sensitivity, MeasuredSensitivity):
        return sensitivity.sensitivity
    if isinstance(sensitivity, Sensitivity):
        return sensitivity
    return load_sensitivity(Path(sensitivity))


def _budget(recipe: Recipe, wanted: Budget) -> BudgetRecipe:
    """Return the user's budget, with the recipe's where the user set nothing."""
    given = BudgetRecipe() if recipe.budget is None else recipe.budget
    goals = {name: getattr(wanted, name) for name in GOALS}
    if all(goal is None for goal in goals.values()):
        goals = {name: getattr(given, name) for name in GOALS}
    treatments = wanted.treatments or given.treatments
    budget = section_of(BudgetRecipe, goals | {"treatments": treatments})
    if not budget.goals:
        raise RecipeError(
            f"recipe {recipe.name}: no budget; give bytes, error, speed or ssim, or give the "
            "recipe a budget section",
            fields=GOALS,
        )
    return budget


def _search(
    measured: Sensitivity,
    base: Recipe,
    budget: BudgetRecipe,
    pictures: Pictures | None,
    progress: Progress,
) -> tuple[Selection, tuple[Trial, ...]]:
    """Return the choice whose pictures keep the SSIM, and the trials on the way."""
    if pictures is None:
        raise RecipeError(
            "budget ssim: pictures have to be made for it; give a model and a calibration too",
            fields=("model", "calibration"),
        )
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
    measured: Sensitivity, pictures: Pictures, device: torch.device
) -> GenerationSettings:
    section = pictures.sampling.apply(measured.recipe).calibration
    texts = choose_prompts(pictures.prompts, pictures.sampling.count, device=device, last=True)
    return make_settings(
        texts,
        steps=section.steps,
        guidance=section.guidance,
        seed=section.seed,
        batch=section.batch,
    )
