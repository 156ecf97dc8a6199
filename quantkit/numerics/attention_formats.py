"""The formats that attention may be multiplied in: one literal row each. Needs no torch."""

from dataclasses import dataclass

from quantkit.errors import RecipeError

#: The word for 16 bit, in recipes and checkpoints.
NONE = "none"


@dataclass(frozen=True)
class AttentionFormat:
    """Formats of both products of an attention module."""

    #: of queries and keys
    qk: str
    #: of probabilities and values; None: float16
    pv: str | None
    #: time by the machine code for gfx1201, in that of the first row: means of heads of 64 and 128
    #: columns, with 4 cycles for an exponential (docs/notes/kernels.md)
    cost: float

    @property
    def name(self) -> str:
        """As ``int8``, or ``int8-pv16``."""
        return self.qk if self.pv else f"{self.qk}-pv16"

    @property
    def pv_word(self) -> str:
        """The word for the formats of probabilities and values in recipes and checkpoints."""
        return self.pv or NONE


#: Calibrations store errors in this order: a new row goes to the end.
ATTENTION_FORMATS = (
    AttentionFormat("e4m3fn", "e4m3fn", 1.0),
    AttentionFormat("int8", "e4m3fn", 1.14),
    AttentionFormat("e4m3fn", None, 1.34),
    AttentionFormat("int8", None, 1.46),
)
QK_FORMATS = tuple(dict.fromkeys(row.qk for row in ATTENTION_FORMATS))
PV_FORMATS = tuple(dict.fromkeys(row.pv for row in ATTENTION_FORMATS))


def attention_format(qk: str, pv: str | None) -> AttentionFormat:
    """Return the row of these formats.

    Raises:
        RecipeError: there is none.
    """
    for row in ATTENTION_FORMATS:
        if (row.qk, row.pv) == (qk, pv):
            return row
    known = ", ".join(row.name for row in ATTENTION_FORMATS)
    raise RecipeError(f"attention: qk {qk!r:.40} with pv {pv!r:.40}, expected one of {known}")
