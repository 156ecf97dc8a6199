"""Reading recipes: YAML text to ``Recipe``, with errors that name the key and the cure."""

import difflib
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from quantkit import resources
from quantkit.errors import QuantkitError, RecipeError
from quantkit.recipe.attention_recipe import AttentionRecipe
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.component_recipes import (
    ComponentOverride,
    EncoderOverride,
    EncoderRecipe,
    VaeRecipe,
)
from quantkit.recipe.fields import is_glob
from quantkit.recipe.goals import BudgetRecipe, Gates
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe
from quantkit.recipe.schema import Override, Recipe, SparsityRecipe
from quantkit.storage.inputfile import read_text
from quantkit.storage.jsonfile import short
from quantkit.storage.yamlfile import MAX_BYTES, parse_yaml

#: Each is compared with every layer; a bundled recipe has thirty.
MAX_GLOBS = 1000
#: Letters of a message about a recipe, after its name.
_LENGTH = 300


def recipe_names() -> tuple[str, ...]:
    """Return the names of the bundled recipes, sorted."""
    return tuple(sorted(path.stem for path in resources.recipes().glob("*.yaml")))


def load_recipe(recipe: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Return the bundled recipe of this name, or the one in the YAML file at this path.

    Args:
        recipe: as ``fp8``, one of ``recipe_names()``; or a file.
        changes: values to set, by their dotted keys, as ``{"calibration.steps": 8}``.

    Returns:
        what other functions take as a recipe.

    Raises:
        RecipeError: no such recipe, not YAML, an unknown key, a value out of range.
    """
    found = _load(recipe)
    return change_recipe(found, changes) if changes else found


def _load(recipe: str | Path) -> Recipe:
    path, text = Path(recipe), str(recipe)
    # Not Path.is_file, which raises for names that are too long.
    if path.suffix in {".yaml", ".yml"} or os.path.isfile(text):  # noqa: PTH113
        return parse_recipe(read_text(path, MAX_BYTES, error=RecipeError), where=text)
    if text not in recipe_names():
        known = recipe_names()
        raise RecipeError(
            f"recipe {text!r:.80}: neither a bundled recipe nor a .yaml file"
            f"{did_you_mean(text, known)}; bundled are {', '.join(known)}"
        )
    path = resources.recipes() / f"{text}.yaml"
    return parse_recipe(read_text(path, MAX_BYTES, error=RecipeError), where=f"recipe {text}")


def parse_recipe(text: str, *, where: str) -> Recipe:
    """Return the recipe written in ``text``.

    Args:
        text: YAML.
        where: what error messages call it.

    Raises:
        RecipeError: not YAML, an unknown key, a value out of range.
    """
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise RecipeError(f"{where}: {short(error, _LENGTH)}") from error
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: found {type(values).__name__}, expected a table of settings")
    return _validated(values, where)


def change_recipe(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with values set by their dotted keys, as ``calibration.steps``.

    Raises:
        RecipeError: an unknown key, a value out of range, a key inside of what is no table.
    """
    where = f"recipe {recipe.name} with {', '.join(changes)}"
    values = recipe.model_dump(exclude_unset=True)
    for key, value in changes.items():
        _set(values, key, value, where)
    return _validated(values, where)


def _set(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    *path, name = key.split(".")
    for number, part in enumerate(path, 1):
        inner = values.setdefault(part, {})
        # An optional section that the recipe switches off, or says in a word.
        if inner is None:
            inner = values[part] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"{where}: {'.'.join(path[:number])} is no table; set it as a whole")
        values = inner
    values[name] = value


def _validated(values: Mapping[str, Any], where: str) -> Recipe:
    if (count := _globs(values)) > MAX_GLOBS:
        raise RecipeError(
            f"{where}: {count:,} globs, expected at most {MAX_GLOBS:,}; give names without *, ? "
            "and [, of which there may be more"
        )
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: {_first(error)}") from error
    except QuantkitError as error:
        raise RecipeError(f"{where}: {short(error, _LENGTH)}") from error


def _globs(values: object) -> int:
    """Return how many globs stand anywhere in values, which are not nested deep."""
    if isinstance(values, str):
        return is_glob(values)
    inner = values.values() if isinstance(values, Mapping) else values
    return sum(map(_globs, inner)) if isinstance(inner, Iterable) else 0


def _first(error: ValidationError) -> str:
    """Return the first complaint as one line."""
    complaint = error.errors(include_url=False)[0]
    path = [f"{part!s:.80}" for part in complaint["loc"]]
    place = ".".join(path)
    if complaint["type"] == "extra_forbidden":
        known = _fields_at(complaint["loc"][:-1])
        return f"unknown key {place!r}{did_you_mean(path[-1], known)}; known: {', '.join(known)}"
    found = "" if complaint["type"] == "missing" else f", found {reprlib.repr(complaint['input'])}"
    return f"{place}: {complaint['msg']:.{_LENGTH}}{found}"


#: Sections by key, for the keys that a typing mistake may have meant.
_SECTIONS: dict[str, type[BaseModel]] = {
    "weight": WeightRecipe,
    "activation": ActivationRecipe,
    "sparsity": SparsityRecipe,
    "calibration": CalibrationRecipe,
    "overrides": Override,
    "text_encoders": EncoderRecipe,
    "attention": AttentionRecipe,
    "text_encoders.overrides": EncoderOverride,
    "vae": VaeRecipe,
    "vae.overrides": ComponentOverride,
    "gates": Gates,
    "budget": BudgetRecipe,
}


def _fields_at(path: Sequence[str | int]) -> tuple[str, ...]:
    names = [part for part in path if isinstance(part, str)]
    section = _SECTIONS.get(".".join(names)) or (_SECTIONS[names[-1]] if names else Recipe)
    return tuple(section.model_fields)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return a question about the known word that is nearest, or nothing when none is near."""
    # The time that comparing takes is that of both lengths.
    close = difflib.get_close_matches(word[:80], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
