"""Which bundled recipe is for which model: what is taken where nobody names one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.models.families import FAMILIES, find_family
from quantkit.models.family import Family
from quantkit.models.source import Model
from quantkit.recipe.load import load_recipe, recipe_names
from quantkit.recipe.schema import Recipe
from quantkit.storage.jsonfile import read_json

#: What the names of a family's recipes end with, best first, and what speaks for each.
WHY = {
    "fp8": "half the size; needs no calibration; fastest on cards with FP8",
    "int8": "half the size; fastest on cards without FP8, as RDNA3 and Ampere",
    "int4": "a quarter of the size, for cards with little memory",
}
#: Of the general family there are recipes of these names instead.
_GENERAL = {"fp8": "fp8", "int8": "int8", "int4": "int4-gptq"}


@dataclass(frozen=True)
class Choice:
    """A bundled recipe that is made for a model, or for any."""

    recipe: Recipe
    #: what speaks for it
    why: str


def recipes_for(model: Model) -> tuple[Choice, ...]:
    """Return the bundled recipes for a model, the recommended one first."""
    component = model.components[0]
    made = _prefix_of(component.family, read_json(component.path / "config.json"))
    names = {kind: _GENERAL[kind] if made is None else f"{made}-{kind}" for kind in WHY}
    known = set(recipe_names())
    return tuple(Choice(load_recipe(names[k]), why) for k, why in WHY.items() if names[k] in known)


def chosen_recipe(model: Model) -> Recipe:
    """Return the recipe of a model for which nobody names one: nothing has to fit all its globs."""
    return recipes_for(model)[0].recipe.model_copy(update={"unmatched": "ignore"})


def recipe_of_class(class_name: str, config: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a denoiser class, without files of it."""
    made = _prefix_of(find_family(class_name), config)
    return load_recipe("fp8" if made is None else f"{made}-fp8")


def _prefix_of(family: Family, config: Mapping[str, Any]) -> str | None:
    """Return what the names of the recipes for a denoiser begin with; None: there are none."""
    if family not in FAMILIES:
        return None
    if family.name != "unet":
        return family.name
    return "sdxl" if config.get("addition_embed_type") == "text_time" else "sd15"
