"""Arguments as users have them: paths, names, or what they opened already."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from quantkit.errors import ModelError
from quantkit.models.recipe_check import refuse_unmatched
from quantkit.models.recommended import tuned
from quantkit.models.source import Model, SingleFile, of_family, open_model
from quantkit.models.treated import recipe_of
from quantkit.recipe.fields import section_of
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Recipe, SparsityRecipe

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
    return open_model(model, variant=variant)


def as_recipe(recipe: RecipeLike) -> Recipe:
    """Return the recipe, read if it is a name or a file."""
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def opened(model: ModelLike, recipe: RecipeLike) -> tuple[Model, Recipe]:
    """Return both, opened, which fit each other; the recipe is tuned for the model's family.

    The recipe is read first: a mistake in it should not show after a download.

    Raises:
        ModelError: as ``open_model``.
        RecipeError: as ``load_recipe`` and ``fitted``.
    """
    chosen = as_recipe(recipe)
    return fitted(as_model(model), chosen, name_of(recipe))


def fitted(model: Model, recipe: Recipe, where: str) -> tuple[Model, Recipe]:
    """Return a model, of the family that a recipe names, and the recipe as its layers follow it.

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


def with_encoders(recipe: RecipeLike, text_encoders: str | None) -> RecipeLike:
    """Return the recipe, text encoders packed as a short name says if there is one.

    Args:
        recipe: a bundled name, a YAML file, or opened.
        text_encoders: a name in ENCODER_FORMATS; None: as the recipe says.

    Returns:
        what other functions take as a recipe.

    Raises:
        RecipeError: as ``load_recipe``; another name.
    """
    return recipe if text_encoders is None else as_recipe(recipe).with_text_encoders(text_encoders)


def name_of(recipe: RecipeLike) -> str:
    """Return what messages call a recipe."""
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
    """Return what computes with the second moments, if there are any."""
    found = as_hessians(hessians)
    if found is None:
        return None
    from quantkit.pipelines.running import choose_device
    from quantkit.sparsity.sparsegpt import Surgeon

    return Surgeon(found, choose_device(device), scratch)


@dataclass(frozen=True)
class Sampling:
    """How a pipeline is run on prompts; None: as the recipe's calibration section says."""

    #: use the first so many prompts; None: all of those given, the recipe's number of the bundled
    count: int | None = None
    #: denoising steps
    steps: int | None = None
    guidance: float | None = None
    #: of the first prompt's noise
    seed: int | None = None
    #: prompts denoised at a time
    batch: int | None = None

    def apply(
        self,
        recipe: Recipe,
        *,
        prompts: int | None = None,
        weighting: str | None = None,
        row_share: float | None = None,
    ) -> Recipe:
        """Return the recipe with what is set here in its calibration section.

        Args:
            recipe: whose calibration section says the rest.
            prompts: how many are used; None: the recipe's number.
            weighting: of timesteps, for second moments; None: the recipe's.
            row_share: of the rows that second moments look at; None: the recipe's.

        Raises:
            RecipeError: a value out of range, or settings that do not go together.
        """
        given = {
            "prompts": prompts, "steps": self.steps, "guidance": self.guidance, "seed": self.seed,
            "batch": self.batch, "weighting": weighting, "row_share": row_share,
        }  # fmt: skip
        return recipe.with_calibration({n: v for n, v in given.items() if v is not None})

    def wanted(self, texts: Sequence[str], *, given: bool) -> int | None:
        """Return how many prompts are used; None: as many as the recipe says.

        Args:
            texts: the prompts that are there.
            given: the user named them, so all are used.
        """
        return (self.count or len(texts)) if self.count or given else None


def with_rule(
    recipe: Recipe,
    *,
    pattern: str | None = None,
    method: str | None = None,
    error_budget: float | None = None,
) -> Recipe:
    """Return the recipe with settings of its sparsity section replaced; None: the recipe's.

    Raises:
        RecipeError: a value out of range.
    """
    rule = {"pattern": pattern, "method": method, "error_budget": error_budget}
    section = recipe.sparsity or SparsityRecipe()
    values = {name: getattr(section, name) for name in SparsityRecipe.model_fields}
    new = section_of(SparsityRecipe, values | {n: v for n, v in rule.items() if v is not None})
    return recipe.model_copy(update={"sparsity": new})
