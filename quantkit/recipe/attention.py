"""What a recipe says of attention."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from quantkit.errors import RecipeError
from quantkit.numerics.attention_limits import COLUMNS, MARGIN
from quantkit.recipe.fields import Patterns, Strict


def _either_way_round(text: object) -> object:
    return "2:4" if text == "4:2" else text


class AttentionRecipe(Strict):
    """Attention of denoisers on 8-bit codes."""

    #: of queries and keys
    qk: Literal["e4m3fn", "int8"] = "e4m3fn"
    #: of probabilities and values; none: 16 bit
    pv: Literal["e4m3fn", "none"] = "e4m3fn"
    #: dynamic: of each call's own numbers; static: from calibration
    scales: Literal["dynamic", "static"] = "dynamic"
    #: what static ranges are multiplied by
    margin: Annotated[float, Field(ge=1, le=16)] = MARGIN
    #: attention over fewer keys stays in 16 bit
    min_keys: Annotated[int, Field(ge=1)] = 512
    #: modules whose attention stays in 16 bit
    exclude: Patterns = ()
    #: what is left out of models that ``quantkit rotate`` wrote: last columns of queries and keys,
    #: two of every four columns of each key, or what is faster
    sparse_k: Annotated[
        Literal["none", "rank", "2:4", "auto"], BeforeValidator(_either_way_round)
    ] = "none"
    #: columns that every head keeps; None: by module, the fewest within error_budget
    rank: Annotated[int, Field(ge=COLUMNS, multiple_of=COLUMNS)] | None = None
    #: relative error of a module's output that this may cost
    error_budget: Annotated[float, Field(gt=0, lt=1)] = 0.02

    @property
    def needs_calibration(self) -> bool:
        """True when something is chosen from what was observed."""
        return self.scales == "static" or self.sparse_k != "none"

    @model_validator(mode="after")
    def _rank_is_asked_for(self) -> "AttentionRecipe":
        if self.rank is not None and self.sparse_k != "rank":
            raise RecipeError(
                f"attention.rank {self.rank}: found sparse_k {self.sparse_k}, wanted rank; set "
                "sparse_k: rank, or drop rank"
            )
        return self
