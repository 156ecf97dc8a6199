"""What a recipe says of attention."""

from typing import Annotated, Literal

from pydantic import Field

from quantkit.numerics.attention_scales import MARGIN
from quantkit.recipe.fields import Patterns, Strict


class AttentionRecipe(Strict):
    """Attention of denoisers on 8-bit codes."""

    #: of queries and keys; probabilities and values are e4m3fn
    qk: Literal["e4m3fn", "int8"] = "e4m3fn"
    #: dynamic: of each call's own numbers; static: from calibration
    scales: Literal["dynamic", "static"] = "dynamic"
    #: what static ranges are multiplied by
    margin: Annotated[float, Field(ge=1, le=16)] = MARGIN
    #: attention over fewer keys stays in 16 bit
    min_keys: Annotated[int, Field(ge=1)] = 512
    #: modules whose attention stays in 16 bit
    exclude: Patterns = ()
