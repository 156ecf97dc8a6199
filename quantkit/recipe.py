"""Recipes: frozen, strictly checked values. What to do, never how.

Layer patterns are fnmatch globs on the module path inside the component, as
``down_blocks.*.attentions.*``. Nothing here opens a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from quantkit.errors import RecipeError
from quantkit.numerics.granularity import parse_granularity


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _checked_granularity(text: str) -> str:
    return str(parse_granularity(text))


def _checked_pattern(text: str) -> str:
    from quantkit.numerics.masks import parse_pattern

    return str(parse_pattern(text))


def _ascending(buckets: "Buckets") -> "Buckets":
    if isinstance(buckets, int):
        if buckets < 1:
            raise RecipeError(f"buckets {buckets}: wanted at least 1")
    elif buckets != "auto" and not (buckets and all(a < b for a, b in pairwise(buckets))):
        raise RecipeError(f"buckets {buckets}: wanted ascending timestep edges, a number or auto")
    return buckets


def _alpha_or_auto(smooth: "Smooth") -> "Smooth":
    if smooth != "auto" and not 0 <= smooth <= 1:
        raise RecipeError(f"smooth {smooth:g}: wanted 0 to 1, or auto")
    return smooth


Smooth = float | Literal["auto"]
Buckets = int | tuple[float, ...] | Literal["auto"]
Format = Literal["e4m3fn", "e5m2"]
Percentile = Annotated[float, Field(gt=0, le=100)]
Patterns = tuple[str, ...]


class WeightRecipe(_Strict):
    """How weights become FP8."""

    format: Format = "e4m3fn"
    #: tensor, channel or group:SIZE
    granularity: Annotated[str, AfterValidator(_checked_granularity)] = "channel"
    observer: Literal["amax", "mse"] = "amax"


class ActivationRecipe(_Strict):
    """How inputs of packed layers become FP8, in the format of the weight."""

    mode: Literal["none", "static", "token"] = "token"
    #: what chooses a static scale from the statistics
    observer: Literal["amax", "percentile", "mse", "kl", "moving_average"] = "mse"
    percentile: Percentile = 99.99
    #: timestep buckets that have a static scale of their own: how many, their edges, or auto
    buckets: Annotated[Buckets, AfterValidator(_ascending)] = 1


class SparsityRecipe(_Strict):
    """Which layers are masked, and how."""

    pattern: Annotated[str, AfterValidator(_checked_pattern)] = "2:4"
    method: Literal["magnitude", "wanda"] = "magnitude"
    layers: Patterns = ("*",)
    exclude: Patterns = ()
    #: mask only layers that lose at most this share of their output's power; None: all
    error_budget: Annotated[float, Field(gt=0)] | None = None


class CalibrationRecipe(_Strict):
    """How the pipeline is run for statistics."""

    prompts: Annotated[int, Field(ge=1)] = 16
    steps: Annotated[int, Field(ge=1)] = 20
    #: None: the pipeline's own default
    guidance: float | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    #: timestep buckets kept apart in the statistics
    buckets: Annotated[int, Field(ge=1)] = 4
    #: prompts per run of the pipeline
    batch: Annotated[int, Field(ge=1)] = 4

    @model_validator(mode="after")
    def _a_step_in_every_bucket(self) -> "CalibrationRecipe":
        if self.buckets > self.steps:
            raise RecipeError(
                f"buckets {self.buckets}: more than the {self.steps} steps; take fewer buckets"
            )
        return self


class Override(_Strict):
    """Another treatment for some layers. Of overrides that match, the last to set a field wins."""

    layers: Annotated[Patterns, Field(min_length=1)]
    #: True: stay in 16 bit; False: pack what the family would keep
    keep: bool | None = None
    weight: WeightRecipe | None = None
    activation: ActivationRecipe | None = None
    #: True or False: mask or do not mask, whatever the sparsity section says
    sparse: bool | None = None


class Gates(_Strict):
    """What the packed pipeline must reach; None leaves the default of 'quantkit eval report'."""

    ssim: Annotated[float, Field(ge=-1, le=1)] | None = None
    lpips: Annotated[float, Field(ge=0)] | None = None
    #: largest relative loss of the CLIP score, in percent
    clip_loss: float | None = None


@dataclass(frozen=True)
class LayerSettings:
    """What a recipe says about one layer."""

    #: None: as the family has it
    keep: bool | None
    weight: WeightRecipe
    activation: ActivationRecipe
    #: whether the recipe wants a mask, eligible or not
    sparse: bool


class Recipe(_Strict):
    """Everything that a run of quantkit decides."""

    name: str
    description: str = ""
    weight: WeightRecipe = WeightRecipe()
    activation: ActivationRecipe = ActivationRecipe()
    sparsity: SparsityRecipe | None = None
    #: SmoothQuant's alpha: at 1 all of the input's range moves into the weight; auto: by layer
    smooth: Annotated[Smooth, AfterValidator(_alpha_or_auto)] | None = None
    #: bring both halves of skip concatenations to one range
    split_concat: bool = False
    #: add what quantizing a weight takes from its layer's mean output to the bias
    bias_correction: bool = False
    #: layers that stay in 16 bit besides those of the family
    keep: Patterns = ()
    overrides: tuple[Override, ...] = ()
    calibration: CalibrationRecipe = CalibrationRecipe()
    gates: Gates | None = None

    @field_validator("overrides", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return () if value is None else value

    @property
    def needs_calibration(self) -> bool:
        """True when something is chosen from activations."""
        rule = self.sparsity
        return (
            any(activation.mode == "static" for activation in self._activations)
            or self.smooth is not None
            or self.split_concat
            or self.bias_correction
            or (rule is not None and (rule.method == "wanda" or rule.error_budget is not None))
        )

    @model_validator(mode="after")
    def _smoothing_has_a_scale(self) -> "Recipe":
        key = "smooth" if self.smooth is not None else "split_concat"
        if (self.smooth is not None or self.split_concat) and any(
            a.mode == "static" and a.observer == "moving_average" for a in self._activations
        ):
            raise RecipeError(
                f"{key} with activation.observer moving_average: it was taken over all channels, "
                "before they were rescaled; choose another observer, or activation.mode: token"
            )
        return self

    @property
    def _activations(self) -> tuple[ActivationRecipe, ...]:
        return (self.activation, *(o.activation for o in self.overrides if o.activation))

    def settings(self, layer: str) -> LayerSettings:
        """Return what holds for the layer at this module path."""
        keep: bool | None = True if matches(layer, self.keep) else None
        weight, activation, sparse = self.weight, self.activation, self._sparse(layer)
        for override in self.overrides:
            if matches(layer, override.layers):
                keep = keep if override.keep is None else override.keep
                weight = override.weight or weight
                activation = override.activation or activation
                sparse = sparse if override.sparse is None else override.sparse
        return LayerSettings(keep, weight, activation, sparse)

    def with_calibration(self, settings: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with some settings of its calibration section replaced.

        Raises:
            RecipeError: settings that do not go together.
        """
        section = CalibrationRecipe(**{**self.calibration.model_dump(), **settings})
        return self.model_copy(update={"calibration": section})

    def _sparse(self, layer: str) -> bool:
        rule = self.sparsity
        return rule is not None and matches(layer, rule.layers) and not matches(layer, rule.exclude)


def matches(layer: str, patterns: Sequence[str]) -> bool:
    """Tell whether one of the globs matches the module path."""
    return any(fnmatchcase(layer, pattern) for pattern in patterns)
