"""Arguments as users pass them: paths, names, or opened objects."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from quantkit.errors import ModelError, PromptError, RecipeError
from quantkit.models.recipe_check import refuse_unmatched
from quantkit.models.recommended import tuned
from quantkit.models.source import Model, SingleFile, of_family, open_model
from quantkit.models.treated import recipe_of
from quantkit.recipe.load import change_recipe, load_recipe
from quantkit.recipe.schema import Recipe
from quantkit.storage.jsonfile import short
from quantkit.storage.yamlfile import parse_yaml
from quantkit.workflow.paths import refuse_nowhere

if TYPE_CHECKING:
    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration
    from quantkit.sparsity.maskfile import MaskSet
    from quantkit.sparsity.sparsegpt import Surgeon

ModelLike: TypeAlias = str | Path | SingleFile | Model
RecipeLike: TypeAlias = str | Path | Recipe
CalibrationLike: TypeAlias = Union[str, Path, "Calibration"]
HessiansLike: TypeAlias = Union[str, Path, "Hessians"]
MasksLike: TypeAlias = Union[str, Path, "MaskSet"]
#: a file with one prompt a line, or the prompts themselves
PromptsLike: TypeAlias = str | Path | Sequence[str]


def as_model(model: ModelLike, *, variant: str | None = None) -> Model:
    """Return the model, opened if it is not: of a variant of weights if named.

    Raises:
        ModelError: as ``open_model``; a variant of a single file.
    """
    if isinstance(model, SingleFile):
        if variant is not None:
            raise ModelError(
                f"{model}: a single file has no variants; drop variant", fields=("variant",)
            )
        from quantkit.workflow.single_file import open_single_file

        return open_single_file(model)
    if isinstance(model, Model):
        return model
    if os.path.isfile(model):  # noqa: PTH113
        from quantkit.workflow.single_file import bare_file

        return as_model(bare_file(model), variant=variant)
    refuse_nowhere(model)
    return open_model(model, variant=variant)


def as_recipe(recipe: RecipeLike) -> Recipe:
    """Return the recipe, read if it is a name or a file."""
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def recipe_with(recipe: str, changes: Sequence[str]) -> Recipe:
    """Return the recipe of a name or a file with keys set as ``KEY=VALUE`` says, values in YAML.

    Raises:
        RecipeError: as ``load_recipe``; a change without "=", a value that is not YAML.
    """
    values = {}
    for change in changes:
        key, sign, text = change.partition("=")
        if not sign:
            raise RecipeError(f"{change!r:.80}: found no '=', expected KEY=VALUE", fields=("set",))
        try:
            values[key] = parse_yaml(text)
        except ValueError as error:
            raise RecipeError(f"{change!r:.80}: {short(error)}", fields=("set",)) from error
    return load_recipe(recipe, values)


def opened(model: ModelLike, recipe: RecipeLike) -> tuple[Model, Recipe]:
    """Return both, opened and checked against each other; the recipe is tuned for the family.

    The recipe is read first: a mistake in it should not show after a download.

    Raises:
        ModelError: as ``open_model``.
        RecipeError: as ``load_recipe`` and ``fitted``.
    """
    chosen = as_recipe(recipe)
    return fitted(as_model(model), chosen, name_of(recipe))


def fitted(model: Model, recipe: Recipe, where: str) -> tuple[Model, Recipe]:
    """Return a model, of the family that a recipe names, and the recipe tuned for its layers.

    Args:
        model: a pipeline, a denoiser or a text encoder.
        recipe: any.
        where: what messages call it.

    Raises:
        ModelError: the recipe names no family that there is.
        RecipeError: as ``recipe_of`` and ``refuse_unmatched``.
    """
    source = model if recipe.family is None else of_family(model, recipe.family)
    own = recipe_of(source, recipe)
    refuse_unmatched(own, where, source)
    return source, tuned(own, source.components[0].family)


def name_of(recipe: RecipeLike) -> str:
    """Return the name of a recipe in messages."""
    return f"recipe {recipe.name}" if isinstance(recipe, Recipe) else str(recipe)


def as_calibration(calibration: CalibrationLike | None) -> "Calibration | None":
    """Return the calibration, read if it is a path."""
    if not isinstance(calibration, str | Path):
        return calibration
    from quantkit.calibration.statistics.layer_statistics import load_calibration

    return load_calibration(Path(calibration))


def as_hessians(hessians: HessiansLike | None) -> "Hessians | None":
    """Return the second moments, opened if they are a path."""
    if not isinstance(hessians, str | Path):
        return hessians
    from quantkit.calibration.moments.moment_files import load_hessians

    return load_hessians(Path(hessians))


def as_masks(masks: MasksLike | None) -> "MaskSet | None":
    """Return the masks, read if they are a path."""
    if not isinstance(masks, str | Path):
        return masks
    from quantkit.sparsity.maskfile import load_masks

    return load_masks(Path(masks))


def as_path(path: str | Path | None) -> Path | None:
    """Return the path, if there is one."""
    return None if path is None else Path(path)


def as_prompts(prompts: PromptsLike | None) -> tuple[str, ...]:
    """Return the prompts, read if they are a path; None: the bundled set."""
    if prompts is None or isinstance(prompts, str | Path):
        from quantkit.pipelines.running import read_prompts

        return read_prompts(as_path(prompts))
    return tuple(prompts)


def surgeon_of(
    hessians: HessiansLike | None, device: str, scratch: Path | None = None
) -> "Surgeon | None":
    """Return the ``Surgeon`` of the second moments, if there are any."""
    found = as_hessians(hessians)
    if found is None:
        return None
    from quantkit.pipelines.running import choose_device
    from quantkit.sparsity.sparsegpt import Surgeon

    return Surgeon(found, choose_device(device), scratch)


def with_prompts(
    recipe: Recipe, prompts: PromptsLike | None, count: int | None
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with the number of prompts that are used, and all that there are.

    Args:
        recipe: its calibration section says how many of the bundled set are used.
        prompts: texts, or a file with one a line; None: the bundled set.
        count: use the first so many; None: all of those given.

    Raises:
        InputError: prompts that cannot be read, or fewer than the count.
        RecipeError: a count out of range.
    """
    texts = as_prompts(prompts)
    if count is None and prompts is None:
        return recipe, texts
    expected = len(texts) if count is None else count
    if expected > len(texts):
        raise PromptError(
            f"{prompts if isinstance(prompts, str | Path) else 'prompts'}: {len(texts)} prompts, "
            f"expected {expected}; lower the count or give more prompts",
            fields=("count", "prompts"),
        )
    return change_recipe(recipe, {"calibration.prompts": expected}), texts
