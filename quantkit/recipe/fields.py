"""Types of single values in recipes, with their checks."""

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from quantkit.errors import RecipeError
from quantkit.numerics.granularity import parse_granularity


class Strict(BaseModel):
    """A section of a recipe: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def printable(name: str) -> str:
    """Return a name that can stand in a line of text.

    Raises:
        RecipeError: it cannot be.
    """
    if not name.isprintable() or not 0 < len(name) <= 100:
        raise RecipeError(f"name {name!r:.80}: expected 1 to 100 printable letters")
    return name


def checked_granularity(text: str) -> str:
    """Return a granularity in its shortest spelling.

    Raises:
        RecipeError: it cannot be.
    """
    return str(parse_granularity(text))


def checked_format(name: str) -> str:
    """Return the name of a known number format.

    Raises:
        RecipeError: there is none.
    """
    from quantkit.numerics.formats import find_format

    return find_format(name).name


def checked_pattern(text: str) -> str:
    """Return a pattern n:m with the smaller number first.

    Raises:
        RecipeError: it cannot be.
    """
    from quantkit.numerics.masks import parse_pattern

    return str(parse_pattern(text))


def ascending(buckets: "Buckets") -> "Buckets":
    """Return valid timestep buckets.

    Raises:
        RecipeError: it cannot be.
    """
    if isinstance(buckets, int):
        if buckets < 1:
            raise RecipeError(f"buckets {buckets}: expected at least 1")
    elif buckets != "auto" and not (buckets and all(a < b for a, b in pairwise(buckets))):
        raise RecipeError(f"buckets {buckets}: expected ascending timestep edges, a number or auto")
    return buckets


def alpha_or_auto(smooth: "Smooth") -> "Smooth":
    """Return a valid strength of SmoothQuant.

    Raises:
        RecipeError: it cannot be.
    """
    if smooth != "auto" and not 0 <= smooth <= 1:
        raise RecipeError(f"smooth {smooth:g}: expected 0 to 1, or auto")
    return smooth


Smooth = float | Literal["auto"]
Buckets = int | tuple[float, ...] | Literal["auto"]
Format = Annotated[str, AfterValidator(checked_format)]
Percentile = Annotated[float, Field(gt=0, le=100)]
Patterns = tuple[str, ...]
#: What fnmatch takes for more than itself.
_WILD = frozenset("*?[")


def matches(layer: str, patterns: Sequence[str]) -> bool:
    """Tell whether one of the globs matches the module path."""
    names, globs = _compiled(tuple(patterns))
    return layer in names or globs.match(layer) is not None


def is_glob(pattern: str) -> bool:
    """Tell whether a pattern has wildcards."""
    return not _WILD.isdisjoint(pattern)


@lru_cache(maxsize=1024)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str]]:
    """Return the names among globs, as many as a model has layers, and one pattern of the rest."""
    globs = [translate(pattern) for pattern in patterns if is_glob(pattern)]
    # Without globs: what matches nothing.
    return frozenset(patterns), re.compile("|".join(globs) or r"(?!)")
