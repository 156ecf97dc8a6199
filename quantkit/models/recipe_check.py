"""Checks of a command's recipe against the layers of its model."""

from collections.abc import Iterable, Iterator, Sequence

from quantkit.errors import RecipeError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import Model, open_encoders
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


def refuse_unmatched_encoders(recipe: Recipe, where: str, model: Model) -> None:
    """Refuse a recipe with a glob on text encoders, or their layers, that none matches.

    Args:
        recipe: ``text_encoders`` is looked at, unless it says ignore.
        where: what messages call it.
        model: of which headers are read.

    Raises:
        RecipeError: naming the first, and what it may have meant.
        ModelError: text encoders that cannot be opened.
    """
    section = recipe.text_encoders
    if recipe.unmatched == "ignore" or section is None:
        return
    encoders = open_encoders(model)
    names = [layer.name for encoder in encoders for layer in list_layers(encoder)]
    overrides = [(f"text_encoders.overrides.{i}", o) for i, o in enumerate(section.overrides)]
    layers = [("text_encoders.keep", section.keep)]
    layers += [(f"{key}.layers", override.layers) for key, override in overrides]
    globs = [(f"{key}.encoders", override.encoders) for key, override in overrides]
    _refuse(globs, where, [encoder.name for encoder in encoders], "text encoders")
    _refuse(layers, where, names, "layers of text encoders")


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
