"""The attention section of recipes."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quantkit.numerics.attention_formats import ATTENTION_FORMATS, AttentionFormat
from quantkit.numerics.attention_limits import MARGIN
from quantkit.recipe.fields import Patterns, Strict, matches

#: auto: the fastest format within error_budget
Qk = Literal["e4m3fn", "int8", "none", "auto"]
Pv = Literal["e4m3fn", "none", "auto"]

#: What a strategy sets; keys that the recipe gives win.
STRATEGIES: dict[str, dict[str, Any]] = {
    "aggressive": {"qk": "e4m3fn", "pv": "e4m3fn", "scales": "static"},
    "conservative": {"qk": "int8", "pv": "e4m3fn"},
    "hybrid": {"qk": "int8", "pv": "none"},
    "adaptive": {"qk": "auto", "pv": "auto", "scales": "static"},
}


class AttentionOverride(Strict):
    """Other formats for some modules. Of overrides that match, the last to set a field wins."""

    #: globs on attention modules
    layers: Annotated[Patterns, Field(min_length=1)]
    qk: Qk | None = None
    pv: Pv | None = None
    #: the reason, for readers of the recipe
    reason: str = ""


class AttentionRecipe(Strict):
    """Attention of denoisers on 8-bit codes."""

    #: a row of STRATEGIES
    strategy: Literal["aggressive", "conservative", "hybrid", "adaptive"] | None = None
    #: of queries and keys; none: attention stays in 16 bit
    qk: Qk = "e4m3fn"
    #: of probabilities and values; none: 16 bit
    pv: Pv = "e4m3fn"
    #: dynamic: of each call's own numbers; static: from calibration
    scales: Literal["dynamic", "static"] = "dynamic"
    #: the factor of static ranges
    margin: Annotated[float, Field(ge=1, le=16)] = MARGIN
    #: attention over fewer keys stays in 16 bit
    min_keys: Annotated[int, Field(ge=1)] = 512
    #: globs on the modules that this is about; others stay in 16 bit
    layers: Annotated[Patterns, Field(min_length=1)] = ("*",)
    #: modules whose attention stays in 16 bit
    exclude: Patterns = ()
    overrides: tuple[AttentionOverride, ...] = ()
    #: relative error of a module's output that formats may cost
    error_budget: Annotated[float, Field(gt=0, lt=1)] = 0.02

    @property
    def needs_calibration(self) -> bool:
        """True when something is chosen from calibration."""
        return (self.scales == "static" or self.chooses_formats) and not self.is_off

    @property
    def is_off(self) -> bool:
        """True when all attention stays in 16 bit."""
        return self.qk == "none" and not any(o.qk not in {None, "none"} for o in self.overrides)

    @property
    def chooses_formats(self) -> bool:
        """True when the formats of some modules are chosen by their measured errors."""
        words = [(self.qk, self.pv), *((o.qk, o.pv) for o in self.overrides)]
        return any("auto" in pair for pair in words)

    @property
    def errors_from(self) -> int | None:
        """The fewest keys of a call whose errors calibration measures; None: of none."""
        return self.min_keys if self.chooses_formats else None

    @property
    def is_uniform(self) -> bool:
        """True when all modules but excluded ones have the formats that the recipe gives."""
        return self.layers == ("*",) and not self.overrides and not self.chooses_formats

    def formats_of(self, module: str) -> tuple[AttentionFormat, ...]:
        """Return the formats that a module may have, to be chosen by error; none: 16 bit."""
        if not matches(module, self.layers) or matches(module, self.exclude):
            return ()
        qk, pv = self.qk, self.pv
        for override in self.overrides:
            if matches(module, override.layers):
                qk, pv = override.qk or qk, override.pv or pv
        return tuple(
            row
            for row in ATTENTION_FORMATS
            if qk in {"auto", row.qk} and pv in {"auto", row.pv_word}
        )

    @model_validator(mode="before")
    @classmethod
    def _of_strategy(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # What is not known is refused with the others, by its field.
        return {**STRATEGIES.get(str(values.get("strategy")), {}), **values}
