"""Checks that an export has the requested formats and no others."""

from collections.abc import Mapping, Sequence

from quantkit.errors import CheckpointError, RecipeError
from quantkit.numerics.formats import find_format
from quantkit.recipe.component_formats import COMPONENT_FORMATS
from quantkit.recipe.component_recipes import EncoderRecipe
from quantkit.recipe.layer_recipes import WeightRecipe
from quantkit.recipe.load import change_recipe
from quantkit.recipe.schema import Recipe
from quantkit.workflow.export_source import Part, Source


def for_target(recipe: Recipe, to: str, *, encoders: bool) -> Recipe:
    """Return the recipe of a 16-bit model for a target that holds text encoders, or denoisers.

    Args:
        recipe: as it was given.
        to: the target's name, for messages.
        encoders: whether the target holds text encoders; else it holds denoisers.

    Returns:
        the recipe, of a target for text encoders with a treatment of them.

    Raises:
        RecipeError: it says nothing of text encoders, nor are there any in its format; or it says
            something, and the target holds none.
    """
    if recipe.vae is not None:
        raise RecipeError(
            f"recipe {recipe.name}: vae: {to} holds no VAE; drop it", fields=("recipe",)
        )
    if not encoders and recipe.text_encoders is not None:
        raise RecipeError(
            f"recipe {recipe.name}: text_encoders: {to} holds one kind of component; drop it, and "
            "export text encoders to compressed-tensors",
            fields=("recipe",),
        )
    if not encoders or recipe.text_encoders is not None:
        return recipe
    return change_recipe(recipe, {"text_encoders": _encoders_like(recipe)})


def _encoders_like(recipe: Recipe) -> str:
    """Return the treatment of text encoders that has the format of a recipe for denoisers."""
    asked = recipe.weight
    for name, row in COMPONENT_FORMATS[EncoderRecipe.key].items():
        weight = WeightRecipe(**row["weight"])
        if (weight.format, weight.rounding) == (asked.format, asked.rounding):
            return name
    raise RecipeError(
        f"recipe {recipe.name}: says nothing of text encoders, and none have weights in "
        f"{asked.format} rounded to {asked.rounding}; add text_encoders: fp8 (or int8)",
        fields=("recipe",),
    )


def refuse_other_formats(
    source: Source, outputs: Sequence[Mapping[str, str]], *, recipe: Recipe | None, requantize: bool
) -> None:
    """Refuse an output in which a layer has another format than its source, or its recipe.

    Args:
        source: the model.
        outputs: of each component, the formats of its weights in the output, by name; those in 16
            bit are left out.
        recipe: that a 16-bit model is quantized by; None: it is packed, or the target says how.
        requantize: whether formats may change; layers in 16 bit stay so.

    Raises:
        CheckpointError: naming the first such layer.
    """
    for part, formats in zip(source.parts, outputs, strict=True):
        if recipe is None and not part.source.schemes:
            continue
        for name, found in formats.items():
            asked = _of_packed(part, name) if recipe is None else _of_recipe(recipe, part, name)
            if found not in asked and not (requantize and asked):
                raise _refusal(part, name, found, asked, recipe)


def _refusal(
    part: Part, name: str, found: str, asked: set[str], recipe: Recipe | None
) -> CheckpointError:
    who = "the model" if recipe is None else f"recipe {recipe.name}"
    cure = ", or set requantize, which converts it at a loss" if asked else ""
    return CheckpointError(
        f"{part.source.path}: {name.removesuffix('.weight')}: would be in {found}, but {who} has "
        f"{' or '.join(sorted(asked)) or '16 bit'} there; choose another target{cure}",
        fields=("requantize",) if asked else (),
    )


def _of_packed(part: Part, name: str) -> set[str]:
    scheme = part.source.schemes.get(name)
    return set() if scheme is None else _stored(scheme.weight.name)


def _of_recipe(recipe: Recipe, part: Part, name: str) -> set[str]:
    """Return the formats that a recipe may give a layer; none where it is kept."""
    if part.is_encoder and recipe.text_encoders is None:
        # Nothing stands in for an integer there.
        return _stored(recipe.weight.format)
    own = recipe.for_component(EncoderRecipe, part.folder) if part.is_encoder else recipe
    settings = own.settings(name.removesuffix(".weight"))
    weights = [own.kept] if settings.keep else [settings.weight, own.kept]
    named = {n for weight in weights if weight for n in (weight.format, weight.fallback) if n}
    return {stored for found in named for stored in _stored(found)}


def _stored(name: str) -> set[str]:
    """Return a format and its storage format in files of whole bytes: int8 for int4."""
    return {name, find_format(name).byte_format.name}
