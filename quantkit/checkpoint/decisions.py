"""What packing chose by what it measured, for people: entries of the recipe in a shard's header."""

from collections.abc import Mapping
from typing import TypeVar

from quantkit.checkpoint.component import PackedComponent
from quantkit.errors import CheckpointError
from quantkit.storage.jsonfile import DAMAGE, as_type, short

Decision = TypeVar("Decision")


def read_decisions(
    component: PackedComponent, key: str, kind: type[Decision]
) -> dict[str, Decision]:
    """Return what was decided, by module path; empty where the recipe did not ask for it.

    Args:
        component: packed.
        key: of the entry.
        kind: a frozen dataclass, one for a module.

    Raises:
        CheckpointError: the entry is damaged.
    """
    told = component.metadata[0].recipe.get(key, {})
    try:
        if not isinstance(told, Mapping):
            raise TypeError(f"{told!r:.80}, wanted an object")
        return {str(name): as_type(kind, row) for name, row in told.items()}
    except DAMAGE as error:
        raise CheckpointError(
            f"{component.path}: {key} in the header is damaged ({short(error)}); pack the model "
            "again"
        ) from error
