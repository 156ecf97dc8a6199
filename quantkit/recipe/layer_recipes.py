"""The weight and activation sections of recipes."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from quantkit.errors import RecipeError
from quantkit.numerics.formats import find_format
from quantkit.recipe.fields import (
    Buckets,
    Format,
    Percentile,
    Strict,
    ascending,
    checked_granularity,
)


class WeightRecipe(Strict):
    """The quantization of weights."""

    format: Format = "e4m3fn"
    #: tensor, channel or group:SIZE
    granularity: Annotated[str, AfterValidator(checked_granularity)] = "channel"
    observer: Literal["amax", "mse"] = "amax"
    #: pow2: only powers of two, which make codes portable: other scales that are powers of two
    #: hold the same values, but for subnormal codes
    scale: Literal["any", "pow2"] = "any"
    #: nearest code, or gptq: column by column, later ones making up for the error of earlier ones
    rounding: Literal["nearest", "gptq"] = "nearest"
    #: of an integer: what a layer takes instead whose output, weight and input in 8 bits, would be
    #: nearer in it
    fallback: Format | None = None

    @property
    def scale_rule(self) -> str:
        """The rule of ``WEIGHT_SCALES`` that chooses scales."""
        return self.observer if self.scale == "any" else f"{self.observer}_{self.scale}"

    @model_validator(mode="after")
    def _falls_back_on_a_float(self) -> "WeightRecipe":
        if self.fallback is None:
            return self
        if not find_format(self.format).is_integer or find_format(self.fallback).is_integer:
            raise RecipeError(
                f"weight.fallback {self.fallback} with format {self.format}: a float stands in for "
                "an integer; set e4m3fn, or drop fallback"
            )
        return self

    @model_validator(mode="after")
    def _factors_stand_on_channels(self) -> "WeightRecipe":
        fmt = find_format(self.format)
        if self.scale == "pow2" and (fmt.block or fmt.subscale_group):
            raise RecipeError(
                f"weight.scale pow2 with format {self.format}: its groups have steps of their own; "
                "take e4m3fn, e5m2 or int8, or drop scale"
            )
        if fmt.block and self.granularity != f"group:{fmt.block}":
            raise RecipeError(
                f"weight.granularity {self.granularity} with format {self.format}: blocks of "
                f"{fmt.block} have a scale each; set granularity: group:{fmt.block}"
            )
        group = fmt.subscale_group
        if group and self.granularity != "channel":
            raise RecipeError(
                f"weight.granularity {self.granularity} with format {self.format}: groups of "
                f"{group} have an integer factor of their channel's scale; set granularity: channel"
            )
        return self


class ActivationRecipe(Strict):
    """The quantization of inputs: FP8 where the weight is FP8, int8 where it is an integer."""

    mode: Literal["none", "static", "token"] = "token"
    #: the observer that chooses a static scale from the statistics
    observer: Literal["amax", "percentile", "mse", "kl", "moving_average"] = "mse"
    percentile: Percentile = 99.99
    #: pow2: static scales are rounded up to powers of two, which programs that multiply by their
    #: reciprocal in 16 bit (ComfyUI) apply exactly
    scale: Literal["any", "pow2"] = "any"
    #: timestep buckets that have a static scale of their own: how many, their edges, or auto
    buckets: Annotated[Buckets, AfterValidator(ascending)] = 1
    #: timestep below which each row has a scale of its own all the same: what the last step rounds
    #: stays in the picture, what earlier ones round is mended by later ones
    token_below: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _powers_of_two_are_stored(self) -> "ActivationRecipe":
        if self.scale == "pow2" and self.mode != "static":
            raise RecipeError(
                f"activation.scale pow2 with mode {self.mode}: only static scales are stored; set "
                "mode: static, or drop scale"
            )
        return self

    @model_validator(mode="after")
    def _other_steps_are_static(self) -> "ActivationRecipe":
        if self.token_below is not None and self.mode != "static":
            raise RecipeError(
                f"activation.token_below {self.token_below:g} with mode {self.mode}: it is for "
                "inputs with static scales; set mode: static, or drop token_below"
            )
        return self
