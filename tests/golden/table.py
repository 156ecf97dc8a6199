"""Tables of digests, and what differs from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """Digests by name, and what they were made with."""

    #: version by name of the library or compiler
    made_with: Mapping[str, str]
    rows: Mapping[str, str]


def differences(expected: Mapping[str, str], found: Mapping[str, str], renew: str) -> str:
    """Return what changed: a line for each row, and the command that writes the table again.

    Args:
        expected: digests of the table by name.
        found: digests now.
        renew: the command.

    Returns:
        the lines; empty where all is as it was.
    """
    every = {*expected, *found}
    names = [name for name in every if expected.get(name) != found.get(name)]
    if not names:
        return ""
    rows = (
        f"  {name}: expected {expected.get(name, 'no row')}, found {found.get(name, 'none')}"
        for name in sorted(names)
    )
    head = f"{len(names)} of {len(every)} rows changed:"
    return "\n".join((head, *rows, f"if they had to change: {renew}"))
