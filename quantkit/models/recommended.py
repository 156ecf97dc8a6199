"""Bundled recipes with what a model's family sets in them, and those that are recommended."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.models.families import find_family
from quantkit.models.family import Family
from quantkit.models.source import Model
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.load import load_recipe
from quantkit.recipe.recommended import DEFAULT, RECOMMENDED, Recommendation
from quantkit.recipe.schema import Recipe


@dataclass(frozen=True)
class Choice:
    """A recommended recipe, with what the model's family sets in it."""

    recipe: Recipe
    #: for whom it is
    for_whom: Recommendation


def tuned(recipe: Recipe, family: Family) -> Recipe:
    """Return a recipe with the keys that it leaves to the family of a model.

    A key that both set is the recipe's. Of sections that both set the keys are joined, and of
    overrides the recipe's come last, so that they win. Timestep buckets of a calibration are left
    to the family by all recipes that set none, so that one calibration serves them all.
    """
    calibration = _calibration(recipe, family)
    if recipe.tuned is None:
        section = CalibrationRecipe.model_validate(calibration)
        return recipe.model_copy(update={"calibration": section})
    own = recipe.model_dump(exclude_unset=True, exclude={"tuned"})
    own["calibration"] = calibration
    given = family.recipes.get(recipe.tuned, {})
    joined = {key: _joined(given[key], own[key]) for key in given.keys() & own.keys()}
    return Recipe.model_validate({**given, **own, **joined})


def _calibration(recipe: Recipe, family: Family) -> dict[str, Any]:
    """Return the keys of the calibration section; no more buckets than steps, but by its own."""
    own = recipe.calibration.model_dump(exclude_unset=True)
    finest = {"buckets": family.calibration.get("buckets", recipe.calibration.buckets)}
    keys = {**finest, **(family.calibration if recipe.tuned else {}), **own}
    if "buckets" not in own:
        keys["buckets"] = min(keys["buckets"], keys.get("steps", recipe.calibration.steps))
    return keys


def _joined(given: Any, own: Any) -> Any:
    if isinstance(given, Mapping) and isinstance(own, Mapping):
        return {**given, **own}
    return [*given, *own] if isinstance(given, list) else own


def recipes_for(model: Model) -> tuple[Choice, ...]:
    """Return the recommended recipes of a model, the best one first."""
    family = model.components[0].family
    return tuple(Choice(tuned(load_recipe(row.recipe), family), row) for row in RECOMMENDED)


def recipe_of_class(class_name: str) -> Recipe:
    """Return the recipe of a denoiser class, without files of it."""
    return tuned(load_recipe(DEFAULT), find_family(class_name))
