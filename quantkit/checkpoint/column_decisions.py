"""How many columns of queries and keys each attention module multiplies, and why, for people.

Packing writes it into the recipe of a shard's header; what is computed stands in config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.component import PackedComponent
from quantkit.errors import CheckpointError
from quantkit.storage.jsonfile import DAMAGE, as_type, short

#: The entry of the recipe in the header.
KEY = "sparse_k_chosen"


@dataclass(frozen=True)
class ColumnDecision:
    """What was decided for an attention module; lists are by head."""

    #: as ``rank 32`` or ``2:4``; None: all columns
    chosen: str | None
    #: relative, of the module's output on held-out prompts; None: not measured, or nothing chosen
    error: float | None
    #: 0.1: a tenth more in the same time, by a model of gfx12; None: nothing chosen
    gain: float | None
    #: why, or why not
    reason: str
    #: of softmax over all keys, divided by log(keys); it decides nothing, nor does the next
    entropy: tuple[float, ...]
    #: probability on the keys nearest in the sequence
    locality: tuple[float, ...]
    #: relative, of everything that was measured, by the same names as ``chosen``
    errors: dict[str, tuple[float, ...]]


def column_decisions(component: PackedComponent) -> dict[str, ColumnDecision]:
    """Return what was decided, by module path; empty where the recipe did not ask for it.

    Raises:
        CheckpointError: the entry is damaged.
    """
    told = component.metadata[0].recipe.get(KEY, {})
    try:
        return _parse(told)
    except DAMAGE as error:
        raise CheckpointError(
            f"{component.path}: {KEY} in the header is damaged ({short(error)}); pack the model "
            "again"
        ) from error


def _parse(told: Any) -> dict[str, ColumnDecision]:
    if not isinstance(told, Mapping):
        raise TypeError(f"{told!r:.80}, wanted an object")
    found = {str(name): as_type(ColumnDecision, row) for name, row in told.items()}
    for name, row in found.items():
        heads = len(row.entropy)
        if any(len(values) != heads for values in (row.locality, *row.errors.values())):
            raise ValueError(f"{name:.80}: lists of unequal length, wanted {heads} heads")
    return found
