"""Recipes: frozen, strictly checked values.

Layer patterns are fnmatch globs on the module path inside the component, as
``down_blocks.*.attentions.*``. Nothing here opens a model.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from quantkit.errors import RecipeError
from quantkit.numerics.formats import find_format
from quantkit.recipe.attention_recipe import AttentionRecipe
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.component_recipes import ComponentRecipe, EncoderRecipe, VaeRecipe
from quantkit.recipe.fields import (
    Patterns,
    Smooth,
    Strict,
    alpha_or_auto,
    checked_pattern,
    matches,
    printable,
)
from quantkit.recipe.goals import BudgetRecipe, Gates
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe


class SparsityRecipe(Strict):
    """The sparse layers and the method of their masks."""

    pattern: Annotated[str, AfterValidator(checked_pattern)] = "2:4"
    method: Literal["magnitude", "wanda", "sparsegpt"] = "magnitude"
    layers: Patterns = ("*",)
    exclude: Patterns = ()
    #: mask only layers that lose at most this share of their output's power; None: all
    error_budget: Annotated[float, Field(gt=0)] | None = None


class Override(Strict):
    """Another treatment for some layers. Of overrides that match, the last to set a field wins."""

    layers: Annotated[Patterns, Field(min_length=1)]
    #: True: stay in 16 bit; False: pack what the family would keep
    keep: bool | None = None
    weight: WeightRecipe | None = None
    activation: ActivationRecipe | None = None
    #: True or False: mask or do not mask, whatever the sparsity section says
    sparse: bool | None = None
    #: the reason, for readers of the recipe
    reason: str = ""


@dataclass(frozen=True)
class LayerSettings:
    """The settings of a recipe for one layer."""

    #: None: as the family has it
    keep: bool | None
    weight: WeightRecipe
    activation: ActivationRecipe
    #: whether the recipe wants a mask, eligible or not
    sparse: bool


class Recipe(Strict):
    """Everything that a run of quantkit decides."""

    name: Annotated[str, AfterValidator(printable)]
    description: str = ""
    #: whose rows tell what layers of denoisers do, as general; None: that of the model's class
    family: str | None = None
    #: what the model's family sets for a recipe of this name takes the place of keys that are not
    #: set here; None: nothing does
    tuned: Literal["fp8", "int8", "int4", "fp8-gptq", "fp8-sparse-budget"] | None = None
    weight: WeightRecipe = WeightRecipe()
    activation: ActivationRecipe = ActivationRecipe()
    sparsity: SparsityRecipe | None = None
    #: SmoothQuant's alpha: at 1 all of the input's range moves into the weight; auto: by layer
    smooth: Annotated[Smooth, AfterValidator(alpha_or_auto)] | None = None
    #: add what quantizing a weight takes from its layer's mean output to the bias
    bias_correction: bool = False
    #: how weights are packed that the family keeps in 16 bit, alone: their inputs stay in 16 bit,
    #: and so do layers that read or write the latent; None: not at all
    kept: WeightRecipe | None = None
    #: quantize inputs to integers with no statistics of them at hand
    data_free: bool = False
    #: False: they stay in 16 bit, as most programs but quantkit want them
    convolutions: bool = True
    #: layers that stay in 16 bit besides those of the family
    keep: Patterns = ()
    #: modules that are copied as they are, whatever else the recipe says of them
    not_layers: Patterns = ()
    overrides: tuple[Override, ...] = ()
    #: fp8, int8, int4 or a section; None: text encoders are copied as they are
    text_encoders: EncoderRecipe | None = None
    #: int8 or a section; None: VAEs are copied as they are
    vae: VaeRecipe | None = None
    #: None: attention stays in 16 bit
    attention: AttentionRecipe | None = None
    #: of a glob that no layer of the model matches; ignore is for recipes that serve several models
    unmatched: Literal["error", "ignore"] = "error"
    calibration: CalibrationRecipe = CalibrationRecipe()
    gates: Gates | None = None
    #: chosen within by 'quantkit calibrate optimize'; packing wants the recipe that it writes
    budget: BudgetRecipe | None = None

    @field_validator("overrides", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return () if value is None else value

    @property
    def needs_calibration(self) -> bool:
        """True when something is chosen from activations."""
        rule = self.sparsity
        return (
            self.budget is not None
            or any(a.mode == "static" for a in self._activations)
            or self.smooth is not None
            or self.bias_correction
            or self._integer_inputs
            or (self.attention is not None and self.attention.needs_calibration)
            or (rule is not None and (rule.method == "wanda" or rule.error_budget is not None))
        )

    @property
    def needs_hessians(self) -> bool:
        """True when weights make up for each other's errors, of denoisers or text encoders."""
        encoders = self.text_encoders is not None and self.text_encoders.needs_hessians
        return encoders or self.denoisers_need_hessians

    @property
    def denoisers_need_hessians(self) -> bool:
        """True when weights of denoisers make up for each other's errors."""
        rule = self.sparsity
        sparse = rule is not None and rule.method == "sparsegpt"
        kept = () if self.kept is None else (self.kept,)
        return sparse or any(w.rounding == "gptq" for w in (*self._weights, *kept))

    @model_validator(mode="after")
    def _fallback_has_statistics(self) -> "Recipe":
        if self.data_free and any(weight.fallback for weight in self._weights):
            raise RecipeError(
                "weight.fallback with data_free: the better format is found by statistics; drop one"
            )
        if self.kept is not None and self.kept.fallback:
            raise RecipeError("kept.fallback: no input is quantized there; drop it")
        return self

    @model_validator(mode="after")
    def _smoothing_has_a_scale(self) -> "Recipe":
        if self.smooth is not None and any(
            a.mode == "static" and a.observer == "moving_average" for a in self._activations
        ):
            raise RecipeError(
                "smooth: cannot be used with activation.observer moving_average, which is "
                "measured before channels are rescaled; choose another observer, or "
                "activation.mode: token"
            )
        return self

    @property
    def _weights(self) -> tuple[WeightRecipe, ...]:
        return (self.weight, *(o.weight for o in self.overrides if o.weight))

    @property
    def _integer_inputs(self) -> bool:
        """True when inputs may become integers and the recipe is not data-free."""
        weighs = any(find_format(weight.format).is_integer for weight in self._weights)
        return not self.data_free and weighs and any(a.mode != "none" for a in self._activations)

    @property
    def _activations(self) -> tuple[ActivationRecipe, ...]:
        return (self.activation, *(o.activation for o in self.overrides if o.activation))

    def settings(self, layer: str) -> LayerSettings:
        """Return the settings of the layer at this module path."""
        keep: bool | None = True if matches(layer, self.keep) else None
        weight, activation, sparse = self.weight, self.activation, self._sparse(layer)
        for override in self.overrides:
            if matches(layer, override.layers):
                keep = keep if override.keep is None else override.keep
                weight = override.weight or weight
                activation = override.activation or activation
                sparse = sparse if override.sparse is None else override.sparse
        return LayerSettings(keep, weight, activation, sparse)

    def for_component(self, kind: type[ComponentRecipe], name: str) -> "Recipe":
        """Return the recipe of the layers of a component that is no denoiser.

        Args:
            kind: of its section.
            name: the component's; empty for one alone.

        Raises:
            RecipeError: there is no such section.
        """
        section = getattr(self, kind.key)
        if section is None:
            raise RecipeError(
                f"recipe {self.name}: says nothing of {kind.noun}; add {kind.key}: int8",
                fields=("recipe",),
            )
        values = {
            field: getattr(section, field)
            for field in ("weight", "activation", "data_free", "keep")
        }
        overrides = (o for o in section.overrides if o.is_about(name))
        return Recipe(
            name=self.name,
            **values,
            overrides=tuple(
                Override(**o.model_dump(exclude={"encoders"}, exclude_none=True)) for o in overrides
            ),
            unmatched="ignore",
        )

    def refuse_unmergeable(self) -> None:
        """Refuse static scales of timestep buckets that calibration's cannot be merged into.

        Raises:
            RecipeError: naming the first.
        """
        stored = self.calibration.buckets
        for inputs in self._activations:
            count = inputs.buckets
            if inputs.mode == "static" and isinstance(count, int) and stored % count:
                raise RecipeError(
                    f"recipe {self.name}: its activation.buckets {count} do not divide the "
                    f"{stored} timestep buckets of calibration; take more steps, or buckets: auto",
                    fields=("calibration.steps", "activation.buckets"),
                )

    def refuse_budget(self) -> None:
        """Refuse to carry out a recipe whose treatments are still to be chosen.

        Raises:
            RecipeError: it has a budget.
        """
        if self.budget is not None:
            raise RecipeError(
                f"recipe {self.name}: its budget section does not say yet how each layer is "
                "treated; run 'quantkit calibrate optimize', or 'quantkit run', and use the "
                "recipe it writes"
            )

    def _sparse(self, layer: str) -> bool:
        rule = self.sparsity
        return rule is not None and matches(layer, rule.layers) and not matches(layer, rule.exclude)
