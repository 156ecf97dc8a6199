"""What each attention module is multiplied in, where its error decided, and why; for people.

Packing writes it into the recipe of a shard's header; what is computed stands in config.json.
"""

from dataclasses import dataclass

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.decisions import read_decisions

#: The entry of the recipe in the header.
KEY = "attention_formats_chosen"


@dataclass(frozen=True)
class FormatDecision:
    """What was decided for an attention module."""

    #: a name of ATTENTION_FORMATS, as ``int8-pv16``; None: 16 bit
    chosen: str | None
    #: relative, of the module's output; None: 16 bit
    error: float | None
    #: why
    reason: str
    #: relative, of all formats that were measured, by name
    errors: dict[str, float]


def format_decisions(component: PackedComponent) -> dict[str, FormatDecision]:
    """Return what was decided, by module path; empty where the recipe gives the formats.

    Raises:
        CheckpointError: the entry is damaged.
    """
    return read_decisions(component, KEY, FormatDecision)
