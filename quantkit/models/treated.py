"""The components of a model that are packed, and the recipe of each."""

from quantkit.models.component_layers import list_layers
from quantkit.models.layer_plan import kept_reason
from quantkit.models.source import Component, Model, open_encoders
from quantkit.models.text_encoders import TEXT_ENCODERS
from quantkit.recipe.schema import Recipe


def recipe_of(model: Model, recipe: Recipe) -> Recipe:
    """Return the recipe of a model; for a text encoder alone, its section on text encoders.

    Raises:
        RecipeError: it says nothing of them.
    """
    if model.is_pipeline or model.components[0].family not in TEXT_ENCODERS:
        return recipe
    return recipe.for_encoder("")


def encoders_of(model: Model, recipe: Recipe) -> tuple[tuple[Component, Recipe], ...]:
    """Return the text encoders of a pipeline that are packed, and the recipe of each.

    One that keeps all of its layers in 16 bit is not among them: it is copied.

    Raises:
        ModelError: they cannot be opened.
    """
    if recipe.text_encoders is None:
        return ()
    found = ((encoder, recipe.for_encoder(encoder.name)) for encoder in open_encoders(model))
    return tuple((encoder, own) for encoder, own in found if _packs_any(encoder, own))


def _packs_any(component: Component, recipe: Recipe) -> bool:
    family = component.family
    return any(kept_reason(layer, family, recipe) is None for layer in list_layers(component))
