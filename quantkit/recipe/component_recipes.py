"""The sections of a recipe on components besides denoisers: text encoders and VAEs."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from quantkit.errors import RecipeError
from quantkit.recipe.component_formats import COMPONENT_FORMATS
from quantkit.recipe.fields import Patterns, Strict, matches
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe


class ComponentOverride(Strict):
    """Another treatment for some layers of a component; the last match wins."""

    #: globs on module paths, as the files have them
    layers: Annotated[Patterns, Field(min_length=1)]
    #: True: stay in 16 bit; False: pack what the family would keep
    keep: bool | None = None
    weight: WeightRecipe | None = None
    activation: ActivationRecipe | None = None
    #: the reason, for readers of the recipe
    reason: str = ""

    def is_about(self, component: str) -> bool:
        """Tell whether it is about the component of this name; empty: of one alone."""
        del component
        return True


class EncoderOverride(ComponentOverride):
    """Another treatment for some text encoders, or some of their layers; the last match wins."""

    #: globs on components, as text_encoder_2
    encoders: Annotated[Patterns, Field(min_length=1)]
    layers: Annotated[Patterns, Field(min_length=1)] = ("*",)

    def is_about(self, component: str) -> bool:
        """Tell whether it is about the text encoder of this name; empty: of one alone."""
        return not component or matches(component, self.encoders)


class ComponentRecipe(Strict):
    """The quantization of components of a kind; no statistics of their inputs are used."""

    #: of the recipe, and of COMPONENT_FORMATS
    key: ClassVar[str]
    #: in messages
    noun: ClassVar[str]

    weight: WeightRecipe = WeightRecipe()
    activation: ActivationRecipe = ActivationRecipe(mode="none")
    #: quantize inputs to integers all the same
    data_free: bool = False
    #: layers that stay in 16 bit besides those of the family
    keep: Patterns = ()
    overrides: tuple[ComponentOverride, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_short_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        known = COMPONENT_FORMATS[cls.key]
        if value not in known:
            raise RecipeError(
                f"{cls.key} {value!r:.80}: expected {', '.join(known)}, or a section "
                "with weight, activation, keep and overrides"
            )
        return known[value]

    @property
    def needs_hessians(self) -> bool:
        """True when weights make up for each other's errors."""
        return any(weight.rounding == "gptq" for weight in self._weights)

    @property
    def _weights(self) -> tuple[WeightRecipe, ...]:
        return (self.weight, *(o.weight for o in self.overrides if o.weight))

    @model_validator(mode="after")
    def _needs_no_statistics(self) -> "ComponentRecipe":
        inputs = (self.activation, *(o.activation for o in self.overrides if o.activation))
        refused = {
            "weight.fallback": any(w.fallback for w in self._weights),
            "activation.mode static": any(a.mode == "static" for a in inputs),
        }
        for key, asked in refused.items():
            if asked:
                raise RecipeError(
                    f"{self.key}: {key} needs statistics, and none are taken of {self.noun}; "
                    "use weight.observer mse, and activation.mode none or token"
                )
        return self


class EncoderRecipe(ComponentRecipe):
    """The quantization of text encoders; of calibration, only second moments for GPTQ are used."""

    key = "text_encoders"
    noun = "text encoders"

    overrides: tuple[EncoderOverride, ...] = ()


class VaeRecipe(ComponentRecipe):
    """The quantization of a VAE."""

    key = "vae"
    noun = "VAEs"

    @model_validator(mode="after")
    def _needs_no_moments(self) -> "VaeRecipe":
        if self.needs_hessians:
            raise RecipeError(
                "vae: weight.rounding gptq needs second moments, and none are taken of VAEs; use "
                "rounding nearest"
            )
        return self
