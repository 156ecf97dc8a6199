"""A record of the formats chosen for attention modules by their error, with reasons; for people.

Packing writes it into the recipe of a shard's header; what is computed stands in config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.checkpoint.component import PackedComponent
from quantkit.errors import CheckpointError
from quantkit.storage.jsonfile import DAMAGE, as_type, short

#: The entry of the recipe in the header.
KEY = "attention_formats_chosen"


@dataclass(frozen=True)
class FormatDecision:
    """The decision for an attention module."""

    #: a name of ATTENTION_FORMATS, as ``int8-pv16``; None: 16 bit
    chosen: str | None
    #: relative, of the module's output; None: 16 bit
    error: float | None
    #: why
    reason: str
    #: relative, of all formats that were measured, by name
    errors: dict[str, float]


def format_decisions(component: PackedComponent) -> dict[str, FormatDecision]:
    """Return the decisions, by module path; empty where the recipe sets the formats.

    Raises:
        CheckpointError: the entry is damaged.
    """
    told = component.metadata[0].recipe.get(KEY, {})
    try:
        if not isinstance(told, Mapping):
            raise TypeError(f"{told!r:.80}, expected an object")
        return {str(name): as_type(FormatDecision, row) for name, row in told.items()}
    except DAMAGE as error:
        raise CheckpointError(
            f"{component.path}: {KEY} in the header is damaged ({short(error)}); pack the model "
            "again"
        ) from error
