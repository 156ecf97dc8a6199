"""Reading recipes: YAML text to ``Recipe``, with errors that name the key and the cure."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from quantkit import resources
from quantkit.errors import QuantkitError, RecipeError
from quantkit.recipe import (
    ActivationRecipe,
    CalibrationRecipe,
    Override,
    Recipe,
    SparsityRecipe,
    WeightRecipe,
)
from quantkit.recipegoals import BudgetRecipe, Gates


def recipe_names() -> tuple[str, ...]:
    """Return the names of the bundled recipes, sorted."""
    return tuple(sorted(path.stem for path in resources.recipes().glob("*.yaml")))


def load_recipe(text: str) -> Recipe:
    """Return the bundled recipe called ``text``, or the one in the YAML file at ``text``.

    Raises:
        RecipeError: no such recipe, not YAML, an unknown key, a value out of range.
    """
    path = Path(text)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        return parse_recipe(_read(path), where=text)
    if text not in recipe_names():
        known = recipe_names()
        raise RecipeError(
            f"recipe {text!r}: neither a bundled recipe nor a .yaml file"
            f"{_did_you_mean(text, known)}; bundled are {', '.join(known)}"
        )
    return parse_recipe(_read(resources.recipes() / f"{text}.yaml"), where=f"recipe {text}")


def parse_recipe(text: str, *, where: str) -> Recipe:
    """Return the recipe written in ``text``.

    Args:
        text: YAML.
        where: what error messages call it.

    Raises:
        RecipeError: not YAML, an unknown key, a value out of range.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{where}: not YAML: {reason}") from error
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: found {type(values).__name__}, wanted a table of settings")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: {_first(error)}") from error
    except QuantkitError as error:
        raise RecipeError(f"{where}: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as a UTF-8 recipe ({error})") from error


def _first(error: ValidationError) -> str:
    """Return the first complaint as one line."""
    complaint = error.errors()[0]
    path = [str(part) for part in complaint["loc"]]
    place = ".".join(path)
    if complaint["type"] == "extra_forbidden":
        known = _fields_at(complaint["loc"][:-1])
        return f"unknown key {place!r}{_did_you_mean(path[-1], known)}; known: {', '.join(known)}"
    found = "" if complaint["type"] == "missing" else f", found {complaint['input']!r}"
    return f"{place}: {complaint['msg']}{found}"


#: Sections by key, for the keys that a typing mistake may have meant.
_SECTIONS: dict[str, type[BaseModel]] = {
    "weight": WeightRecipe,
    "activation": ActivationRecipe,
    "sparsity": SparsityRecipe,
    "calibration": CalibrationRecipe,
    "overrides": Override,
    "gates": Gates,
    "budget": BudgetRecipe,
}


def _fields_at(path: Sequence[str | int]) -> tuple[str, ...]:
    names = [part for part in path if isinstance(part, str)]
    section = _SECTIONS[names[-1]] if names else Recipe
    return tuple(section.model_fields)


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
