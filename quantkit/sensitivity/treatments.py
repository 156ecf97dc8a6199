"""The treatments that a layer or an attention module is measured under: one literal row each."""

from dataclasses import dataclass

from quantkit.models.component_layers import Layer
from quantkit.models.layer_plan import dense_reason, factor_reason
from quantkit.numerics.attention_formats import ATTENTION_FORMATS, AttentionFormat
from quantkit.numerics.formats import E4M3FN, E5M2, INT4, INT8, NumberFormat
from quantkit.numerics.granularity import parse_granularity
from quantkit.numerics.masks import SPARSEGPT, TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.recipe.layer_recipes import ActivationRecipe, WeightRecipe

_STATIC, _TOKEN, _NONE = Activation.STATIC, Activation.TOKEN, Activation.NONE


@dataclass(frozen=True)
class Treatment:
    """A treatment of one layer."""

    name: str
    #: of weight and input; None: 16 bit
    format: NumberFormat | None
    activation: Activation
    #: of METHODS; None: dense
    method: str | None = None

    @property
    def input(self) -> NumberFormat | None:
        """Format of the input's codes; None: 16 bit."""
        return None if self.format is None else self.format.byte_format

    @property
    def packs(self) -> bool:
        """True when a packed checkpoint can hold it: masks come with quantized weights only."""
        return self.format is not None or self.method is None

    @property
    def updates(self) -> bool:
        """True when kept weights make up for dropped ones, which takes second moments."""
        return self.method == SPARSEGPT


SIXTEEN_BIT = Treatment("16-bit", None, _NONE)

#: A mask method of numerics.masks comes in as two rows.
TREATMENTS: tuple[Treatment, ...] = (
    SIXTEEN_BIT,
    Treatment("e4m3fn-static", E4M3FN, _STATIC),
    Treatment("e4m3fn-token", E4M3FN, _TOKEN),
    Treatment("e5m2-static", E5M2, _STATIC),
    Treatment("e5m2-token", E5M2, _TOKEN),
    Treatment("int8-static", INT8, _STATIC),
    Treatment("int8-token", INT8, _TOKEN),
    Treatment("int4-token", INT4, _TOKEN),
    Treatment("2:4-magnitude-16-bit", None, _NONE, "magnitude"),
    Treatment("2:4-magnitude-e4m3fn-token", E4M3FN, _TOKEN, "magnitude"),
    Treatment("2:4-wanda-16-bit", None, _NONE, "wanda"),
    Treatment("2:4-wanda-e4m3fn-token", E4M3FN, _TOKEN, "wanda"),
    Treatment("2:4-sparsegpt-16-bit", None, _NONE, SPARSEGPT),
    Treatment("2:4-sparsegpt-e4m3fn-token", E4M3FN, _TOKEN, SPARSEGPT),
)

BY_NAME = {treatment.name: treatment for treatment in TREATMENTS}


@dataclass(frozen=True)
class AttentionTreatment:
    """A treatment of one attention module's products; 16-bit leaves them unchanged."""

    name: str
    format: AttentionFormat


ATTENTION_TREATMENTS = tuple(
    AttentionTreatment(f"attention-{row.name}", row) for row in ATTENTION_FORMATS
)

ATTENTION_BY_NAME = {treatment.name: treatment for treatment in ATTENTION_TREATMENTS}


def refusal(treatment: Treatment, layer: Layer) -> str:
    """Return why the layer cannot have the treatment; "" when it can."""
    if treatment.format and (reason := factor_reason(layer, treatment.format)):
        return reason
    return (dense_reason(layer, TWO_OF_FOUR) or "") if treatment.method else ""


def weight_recipe(treatment: Treatment, base: WeightRecipe) -> WeightRecipe:
    """Return the weight section of a recipe that gives a layer the treatment."""
    values = base.model_dump()
    if treatment.format is not None:
        values["format"] = treatment.format.name
        # Factors of groups stand on a scale per channel.
        values["granularity"] = "channel" if treatment.format.subscale_group else base.granularity
    if treatment.updates:
        values["rounding"] = "gptq"
    return WeightRecipe.model_validate(values)


def activation_recipe(
    treatment: Treatment, base: ActivationRecipe, stored: int
) -> ActivationRecipe:
    """Return the activation section of a recipe that gives a layer the treatment.

    Args:
        treatment: with FP8 inputs.
        base: its observer chooses static scales; its buckets hold if it is static itself.
        stored: timestep buckets of the calibration, which otherwise have a scale each.
    """
    buckets = base.buckets if base.mode == "static" else stored
    changes: dict[str, object] = {"mode": treatment.activation.value, "buckets": buckets}
    if treatment.activation is not _STATIC:
        changes |= {"buckets": 1, "token_below": None, "scale": "any"}
    return ActivationRecipe.model_validate({**base.model_dump(), **changes})


def scheme_of(
    treatment: Treatment, weight: WeightRecipe, edges: tuple[float, ...]
) -> Scheme | None:
    """Return the scheme of the treatment in a packed checkpoint; None: stays as in the source.

    Args:
        treatment: one that packs.
        weight: granularity.
        edges: timesteps between its static scales.
    """
    if treatment.format is None:
        return None
    return Scheme(
        treatment.format,
        parse_granularity(weight_recipe(treatment, weight).granularity),
        None if treatment.method is None else TWO_OF_FOUR,
        treatment.activation,
        edges if treatment.activation is _STATIC else (),
    )
