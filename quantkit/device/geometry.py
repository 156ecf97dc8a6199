"""Launch geometry: what kernels/launch.json says, as numbers.

Grid expressions are integers, argument names, + - * // and ceil_div(a, b): a language that any
launcher can read. They are parsed, never evaluated as Python.
"""

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from quantkit.resources import kernel_sources

Names = Mapping[str, int]
Expression = Callable[[Names], int]

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Geometry:
    """The launch geometry of one variant."""

    #: threads of a block, all along x
    block: int
    #: blocks along x, y and z, over the argument names
    grid: tuple[str, str, str]
    #: static LDS bytes of a block
    lds: int


@dataclass(frozen=True)
class Tile:
    """One entry of the tile menu."""

    m: int
    n: int
    #: K of one step of its loop
    k: int
    #: of a block, which they cut along m, n and k
    waves: tuple[int, int, int]
    #: static LDS bytes of a block, by how weights lie in memory
    lds: Mapping[str, int]

    @property
    def block(self) -> int:
        """Threads of a block."""
        return 32 * prod(self.waves)


@dataclass(frozen=True)
class OwnTile:
    """A tile of a source that shares none with others."""

    #: rows of a block
    m: int
    #: of a step of its loop
    n: int
    #: static LDS bytes of a block
    lds: int


@lru_cache(maxsize=1)
def tiles() -> tuple[Tile, ...]:
    """Return the tile menu; variant word ``t1`` is its entry 1."""
    entries = _launch_file(kernel_sources())["tiles"]
    return tuple(Tile(e["m"], e["n"], e["k"], tuple(e["waves"]), e["lds"]) for e in entries)


def tile_named(word: str) -> Tile | None:
    """Return the entry of the menu that a variant word names; None: it names none."""
    return {f"t{index}": tile for index, tile in enumerate(tiles())}.get(word)


def macros(source: str, tile_word: str, weights: str = "dense") -> tuple[str, ...]:
    """Return what a source is told of its launch, for the compiler's command."""
    launch = geometry_of(source, tile_word, weights)
    values = {"THREADS": launch.block, "LDS_BYTES": launch.lds}
    if own := own_tile(source, tile_word):
        values |= {"TILE_M": own.m, "TILE_N": own.n}
    elif tile_word:
        tile = tiles()[int(tile_word[1:])]
        values |= {"TILE_M": tile.m, "TILE_N": tile.n, "TILE_K": tile.k}
        values |= dict(zip(("WAVES_M", "WAVES_N", "WAVES_K"), tile.waves, strict=True))
    return tuple(f"-DQK_{name}={value}" for name, value in values.items())


def own_tile(source: str, tile_word: str) -> OwnTile | None:
    """Return a tile that a source has instead of the menu's; None when it has none."""
    found = _entry(source).get("tiles")
    return OwnTile(**found[tile_word]) if found else None


def has_tile(source: str, tile_word: str) -> bool:
    """Tell whether a source has the tile: with tiles of its own, it has only these."""
    found = _entry(source).get("tiles")
    return not found or tile_word in found


def geometry_of(source: str, tile_word: str, weights: str = "dense") -> Geometry:
    """Return the block, grid expressions and LDS of a variant, tile sizes filled in.

    Args:
        source: file below ``kernels``.
        tile_word: the variant's word for its tile; empty when it has none.
        weights: how they lie in memory, of ``Tile.lds``.
    """
    entry = _entry(source)
    x, y, z = entry["grid"]
    if own := own_tile(source, tile_word):
        return Geometry(entry["block"], (_filled(x, own), _filled(y, own), z), own.lds)
    if not tile_word:
        return Geometry(entry["block"], (x, y, z), entry["lds"])
    tile = tiles()[int(tile_word[1:])]
    return Geometry(tile.block, (_filled(x, tile), _filled(y, tile), z), tile.lds[weights])


def _filled(text: str, tile: Tile | OwnTile) -> str:
    return text.replace("TILE_M", str(tile.m)).replace("TILE_N", str(tile.n))


def _entry(source: str) -> dict[str, Any]:
    path = kernel_sources() / source
    entry = _launch_file(path.parent)[path.stem]
    assert isinstance(entry, dict)
    return entry


def compile_expression(text: str) -> Expression:
    """Return a function from argument values to the value of a grid expression.

    Raises:
        ValueError: the text is not in the language above.
    """
    return _compile(ast.parse(text, mode="eval").body, text)


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


@lru_cache(maxsize=8)
def _launch_file(folder: Path) -> dict[str, Any]:
    """Return the launch.json beside the sources of a folder."""
    content = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _compile(node: ast.expr, text: str) -> Expression:
    match node:
        case ast.Constant(value=int(value)):
            return lambda _: value
        case ast.Name(id=name):
            return lambda names: names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            apply, a, b = _OPERATORS[type(op)], _compile(left, text), _compile(right, text)
            return lambda names: apply(a(names), b(names))
        case ast.Call(func=ast.Name(id="ceil_div"), args=[left, right], keywords=[]):
            a, b = _compile(left, text), _compile(right, text)
            return lambda names: ceil_div(a(names), b(names))
    raise ValueError(f"grid expression {text!r}: expected integers, names, + - * // and ceil_div")
