"""Listing the bundled recipes, and those for a model with the sizes that each gives."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.models.general_family import GENERAL
from quantkit.models.recommended import recipes_for, tuned
from quantkit.packing.dry_run import forecast_pack, missing_artefacts
from quantkit.recipe import dump
from quantkit.recipe.load import load_recipe, recipe_names
from quantkit.recipe.schema import Recipe
from quantkit.workflow.arguments import ModelLike, RecipeLike, as_model, as_recipe, opened


@dataclass(frozen=True)
class ListedRecipe:
    """A bundled recipe."""

    name: str
    description: str
    #: arguments of ``pack`` that it needs
    needs: tuple[str, ...]
    #: for whom it is recommended; empty: it is only listed
    wish: str = ""
    cards: str = ""
    #: of the model's denoisers
    bytes_before: int = 0
    bytes_after: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values: dict[str, Any] = {
            "name": self.name, "description": self.description, "needs": list(self.needs),
        }  # fmt: skip
        if self.wish:
            sizes = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
            values |= {"wish": self.wish, "cards": self.cards, **sizes}
        return values


def recipes(model: ModelLike | None = None) -> tuple[ListedRecipe, ...]:
    """Return the bundled recipes; with a model the recommended ones, the best one first.

    Args:
        model: a pipeline's or component's directory, a hub id, or opened; None: list all.

    Returns:
        a row for each; of a model with the bytes of its denoisers, planned from headers.

    Raises:
        ModelError: the model cannot be used.
    """
    if model is None:
        return tuple(_listed(tuned(load_recipe(name), GENERAL)) for name in recipe_names())
    source, found = as_model(model), []
    for choice in recipes_for(source):
        forecast = forecast_pack(source, choice.recipe, Path("packed"), missing=())
        planned = forecast.summary.components
        row = replace(
            _listed(choice.recipe),
            wish=choice.for_whom.wish,
            cards=choice.for_whom.cards,
            bytes_before=sum(component.bytes_before for component in planned),
            bytes_after=sum(component.bytes_after for component in planned),
        )
        found.append(row)
    return tuple(found)


def recipe_text(recipe: RecipeLike, model: ModelLike | None = None) -> str:
    """Return a recipe as YAML, to be saved and changed.

    Args:
        recipe: a bundled name, a YAML file, or opened.
        model: a pipeline's or component's directory, a hub id, or opened, for whose family it is
            tuned; None: as it stands.

    Returns:
        what the recipe sets.

    Raises:
        ModelError: the model cannot be used.
        RecipeError: as ``load_recipe``; a glob that matches no layer of the model.
    """
    chosen = as_recipe(recipe) if model is None else opened(model, recipe)[1]
    return dump.recipe_text(chosen, {})


def formats_here() -> tuple[str, ...]:
    """Return a line for each GPU of this machine: its fastest formats, or why it has no kernels."""
    from quantkit.device import headline

    return headline.formats_here()


def _listed(recipe: Recipe) -> ListedRecipe:
    needs = missing_artefacts(recipe, calibration=None, masks=None, hessians=None)
    return ListedRecipe(recipe.name, recipe.description, needs)
