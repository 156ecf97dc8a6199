"""The recommended recipes, by wish and card: what ``recipes``, help, defaults and pages tell."""

from typing import NamedTuple


class Recommendation(NamedTuple):
    """A recipe, and for whom it is."""

    #: what the user wants
    wish: str
    #: of a bundled recipe
    recipe: str
    #: where it is the one to take
    cards: str


#: The best first; what a recipe needs (a calibration, second moments) is its own.
RECOMMENDED = (
    Recommendation("half the size, at once", "fp8", "any card; fast where it has FP8"),
    Recommendation(
        "half the size, nearest to 16 bit", "int8", "any card; the fastest on RX 7000 and RX 6000"
    ),
    Recommendation("a quarter of the size", "int4", "little memory"),
)
#: What commands and functions take when no recipe is named: it needs nothing besides the model.
DEFAULT = RECOMMENDED[0].recipe
