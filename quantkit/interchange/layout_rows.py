"""Rows of tables of names: a tensor or group in its authors' files and in diffusers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: blocks of two streams, and of one, in diffusers
BLOCK = "transformer_blocks.{i}"
SINGLE = "single_transformer_blocks.{i}"
#: projections of the prompt in attention of two streams
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")


@dataclass(frozen=True)
class Row:
    """A weight and a bias, or one tensor, in both layouts.

    Names are module paths, which stand for the weight and the bias, or whole names of tensors.
    ``{i}`` and ``{x}`` are numbers, ``{rest}`` is any rest of a name; other braces hold numbers
    that ``layout_names`` computes from x and i.
    """

    original: str
    #: diffusers' names; several lie one after another along dim 0 of the original
    parts: tuple[str, ...]
    #: whether the halves of dim 0 change places: never, always, or in the last block
    swapped: Literal["never", "always", "last"] = "never"
    #: rows are columns in diffusers
    transposed: bool = False


def one_row(original: str, diffusers: str) -> Row:
    """Return the row of a tensor that only has another name."""
    return Row(original, (diffusers,))


def renamed(original: str, diffusers: str, names: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the rows of a module's tensors, by their names in the original module."""
    return tuple(one_row(f"{original}.{old}", f"{diffusers}.{new}") for old, new in names.items())


def joined(original: str, module: str, names: tuple[str, ...] = ("to_q", "to_k", "to_v")) -> Row:
    """Return the row of weights of one module that lie one after another in the original."""
    return Row(original, tuple(f"{module}.{name}" for name in names))
