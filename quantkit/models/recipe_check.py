"""Checks of a command's recipe against the layers of its model."""

from collections.abc import Iterable, Iterator, Sequence

from quantkit.errors import RecipeError
from quantkit.models.component_kinds import KINDS, VAE
from quantkit.models.component_layers import list_layers
from quantkit.models.pipeline_index import read_pipeline_index
from quantkit.models.source import Component, Model, open_others
from quantkit.models.vaes import VAES
from quantkit.recipe.component_recipes import ComponentRecipe, EncoderOverride
from quantkit.recipe.fields import matches
from quantkit.recipe.load import did_you_mean
from quantkit.recipe.schema import Recipe


def refuse_unmatched(recipe: Recipe, where: str, model: Model) -> None:
    """Refuse a recipe with a glob on layers that none of any denoiser of the model matches.

    Args:
        recipe: ``keep``, ``not_layers``, ``sparsity`` and ``overrides`` are looked at, unless it
            says ignore.
        where: what messages call it.
        model: of which headers are read.

    Raises:
        RecipeError: naming the first, and what it may have meant.
    """
    if recipe.unmatched == "ignore":
        return
    names = [layer.name for component in model.components for layer in list_layers(component)]
    _refuse(_globs(recipe), where, names, "layers")


def refuse_unmatched_others(recipe: Recipe, where: str, model: Model) -> None:
    """Refuse a recipe with a section on what no component of a pipeline is, or a glob in vain.

    Args:
        recipe: whose globs in ``text_encoders`` and ``vae`` are looked at, unless it says ignore.
        where: what messages call it.
        model: of which headers are read.

    Raises:
        RecipeError: naming the first, and what it may have meant.
        ModelError: components that cannot be opened.
    """
    if recipe.vae is not None and model.is_pipeline and not open_others(model, [VAE]):
        raise RecipeError(f"{where}: vae: {_vaes_in(model)}; drop it")
    if recipe.unmatched == "ignore":
        return
    for kind in KINDS:
        section = getattr(recipe, kind.section.key)
        if section is not None:
            _refuse_section(section, where, open_others(model, [kind]))


def _refuse_section(section: ComponentRecipe, where: str, components: Sequence[Component]) -> None:
    key, noun = section.key, section.noun
    names = [layer.name for component in components for layer in list_layers(component)]
    overrides = [(f"{key}.overrides.{i}", o) for i, o in enumerate(section.overrides)]
    layers = [(f"{key}.keep", section.keep)]
    layers += [(f"{place}.layers", override.layers) for place, override in overrides]
    globs = [
        (f"{place}.encoders", override.encoders)
        for place, override in overrides
        if isinstance(override, EncoderOverride)
    ]
    _refuse(globs, where, [component.name for component in components], noun)
    _refuse(layers, where, names, f"layers of {noun}")


def _vaes_in(model: Model) -> str:
    """Return a part of a message on the VAE of a pipeline that is not packed."""
    known = ", ".join(name for family in VAES for name in family.class_names)
    class_name = read_pipeline_index(model.path).get("vae")
    found = f"{class_name} stays in 16 bit" if class_name else "the pipeline has none"
    return f"{found}, and {known} are packed"


def _refuse(
    keys: Iterable[tuple[str, Sequence[str]]], where: str, names: Sequence[str], what: str
) -> None:
    for key, globs in keys:
        for glob in globs:
            if not any(matches(name, (glob,)) for name in names):
                meant = did_you_mean(glob, sorted(_near(names)))
                raise RecipeError(
                    f"{where}: {key}: {glob!r:.80} matches none of the model's {len(names)} {what}"
                    f"{meant or '; correct it, or leave it out'}"
                )


def _globs(recipe: Recipe) -> Iterator[tuple[str, Sequence[str]]]:
    yield "keep", recipe.keep
    yield "not_layers", recipe.not_layers
    if recipe.sparsity is not None:
        yield "sparsity.layers", recipe.sparsity.layers
        yield "sparsity.exclude", recipe.sparsity.exclude
    for index, override in enumerate(recipe.overrides):
        yield f"overrides.{index}.layers", override.layers


def _near(names: Sequence[str]) -> set[str]:
    """Return globs to suggest: paths, their ends and starts, without numbers.

    ``a.0.b`` gives ``a.0.b``, ``a.*.b``, ``a.*`` and ``*.b``.
    """
    found = set(names)
    for name in names:
        words = ["*" if word.isdigit() else word for word in name.split(".")]
        found.add(".".join(words))
        for cut in range(1, len(words)):
            found |= {".".join((*words[:cut], "*")), ".".join(("*", *words[cut:]))}
    return found
