"""The components of a model that are packed, and the recipe of each."""

from quantkit.models.component_kinds import KINDS, kind_of
from quantkit.models.component_layers import list_layers
from quantkit.models.layer_plan import kept_reason
from quantkit.models.source import Component, Model, open_others
from quantkit.recipe.schema import Recipe


def recipe_of(model: Model, recipe: Recipe) -> Recipe:
    """Return the recipe of a model; for a text encoder or VAE alone, its section on these.

    Raises:
        RecipeError: it says nothing of them.
    """
    kind = None if model.is_pipeline else kind_of(model.components[0].family)
    return recipe if kind is None else recipe.for_component(kind.section, "")


def others_of(model: Model, recipe: Recipe) -> tuple[tuple[Component, Recipe], ...]:
    """Return the components of a pipeline that are packed besides denoisers, and their recipes.

    One that keeps all of its layers in 16 bit is not among them: it is copied.

    Raises:
        ModelError: they cannot be opened.
    """
    found = (
        (component, recipe.for_component(kind.section, component.name))
        for kind in KINDS
        if getattr(recipe, kind.section.key) is not None
        for component in open_others(model, [kind])
    )
    return tuple((component, own) for component, own in found if _packs_any(component, own))


def _packs_any(component: Component, recipe: Recipe) -> bool:
    family = component.family
    return any(kept_reason(layer, family, recipe) is None for layer in list_layers(component))
