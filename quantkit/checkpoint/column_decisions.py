"""How many columns of queries and keys each attention module multiplies, and why, for people.

Packing writes it into the recipe of a shard's header; what is computed stands in config.json.
"""

from dataclasses import dataclass

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.decisions import read_decisions

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

    def __post_init__(self) -> None:
        """Refuse lists of unequal length.

        Raises:
            ValueError: naming how many there should be.
        """
        heads = len(self.entropy)
        if any(len(values) != heads for values in (self.locality, *self.errors.values())):
            raise ValueError(f"lists of unequal length, wanted {heads} heads")


def column_decisions(component: PackedComponent) -> dict[str, ColumnDecision]:
    """Return what was decided, by module path; empty where the recipe did not ask for it.

    Raises:
        CheckpointError: the entry is damaged.
    """
    return read_decisions(component, KEY, ColumnDecision)
