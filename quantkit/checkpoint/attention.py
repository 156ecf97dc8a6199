"""The attention of a packed component: its entry in config.json, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from quantkit.checkpoint.attention_formats import KEY as FORMATS
from quantkit.checkpoint.attention_formats import (
    format_to_json,
    formats_to_json,
    parse_format,
    parse_formats,
)
from quantkit.checkpoint.schemes import check_keys, parse_modules
from quantkit.errors import CheckpointError
from quantkit.numerics.attention_formats import AttentionFormat, attention_format
from quantkit.numerics.attention_limits import COLUMNS

#: The key in the quantization_config.
KEY = "attention"
#: The child of an attention module that holds its scales, where they are static.
CHILD = "attention_scales"
_KEYS = ("qk", "min_keys", "exclude")
_STATIC = "static"
_STATIC_KEYS = ("heads", "head_size", "modules")
_RANK = "rank"
_RANK_KEYS = ("rank", "modules")
_TWO_OF_FOUR = "two_of_four"
_PV = "pv"


@dataclass(frozen=True, order=True)
class HeadShape:
    """The heads of an attention module."""

    heads: int
    head_size: int


@dataclass(frozen=True)
class PackedAttention:
    """Attention on 8-bit codes."""

    #: of queries and keys
    qk: str
    #: attention over fewer keys is in 16 bit
    min_keys: int
    #: globs on modules whose attention is in 16 bit
    exclude: tuple[str, ...] = ()
    #: the modules whose scales are stored; others take those of each call's own numbers
    static: Mapping[str, HeadShape] = field(default_factory=dict)
    #: by module: the first columns of each head's queries and keys that are multiplied, where they
    #: are not all
    ranks: Mapping[str, int] = field(default_factory=dict)
    #: the modules that multiply the largest two of every four columns of each key
    two_of_four: tuple[str, ...] = ()
    #: of probabilities and values; None: 16 bit
    pv: str | None = "e4m3fn"
    #: by module, where they are not these two
    formats: Mapping[str, AttentionFormat] = field(default_factory=dict)

    def format_of(self, module: str) -> AttentionFormat:
        """Return the formats of a module on codes."""
        return self.formats.get(module) or self._format

    @property
    def _format(self) -> AttentionFormat:
        return attention_format(self.qk, self.pv)

    @property
    def fewer_columns(self) -> bool:
        """True when a module multiplies fewer columns than there are."""
        return bool(self.ranks or self.two_of_four)

    def to_json(self) -> dict[str, Any]:
        """Return FORMAT.md's ``attention``."""
        value: dict[str, Any] = {"exclude": list(self.exclude), "min_keys": self.min_keys}
        static = {_STATIC: self._static_json()} if self.static else {}
        formats = {FORMATS: formats_to_json(self.formats)} if self.formats else {}
        return {
            **value,
            **format_to_json(self._format),
            **static,
            **self._columns_json(),
            **formats,
        }

    def __str__(self) -> str:
        """Return a line for people."""
        static = f", static scales in {len(self.static)} modules" if self.static else ""
        kept = f"; in 16 bit: {', '.join(self.exclude)}" if self.exclude else ""
        fewer = "".join(
            f"; the first {rank} columns in {list(self.ranks.values()).count(rank)} modules"
            for rank in sorted(set(self.ranks.values()))
        )
        if self.two_of_four:
            fewer += f"; two of four columns of keys in {len(self.two_of_four)} modules"
        values = "" if self.pv else "; probabilities and values in 16 bit"
        names = [found.name for found in self.formats.values()]
        others = "".join(f"; {name} in {names.count(name)} modules" for name in sorted(set(names)))
        return (
            f"queries and keys in {self.qk} from {self.min_keys} keys on{static}{fewer}{values}"
            f"{others}{kept}"
        )

    def _columns_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.ranks:
            modules = sorted((rank, name) for name, rank in self.ranks.items())
            found[_RANK] = [
                {"modules": [name for _, name in group], "rank": rank}
                for rank, group in groupby(modules, key=lambda item: item[0])
            ]
        if self.two_of_four:
            found[_TWO_OF_FOUR] = sorted(self.two_of_four)
        return found

    def _static_json(self) -> list[dict[str, Any]]:
        modules = sorted((shape, name) for name, shape in self.static.items())
        return [
            {
                "head_size": shape.head_size,
                "heads": shape.heads,
                "modules": [name for _, name in group],
            }
            for shape, group in groupby(modules, key=lambda item: item[0])
        ]

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the scales, float32."""
        from quantkit.numerics.attention_scales import SHAPES

        for module, shape in self.static.items():
            for part, by_column in SHAPES.items():
                columns = (shape.head_size,) if by_column else ()
                yield f"{module}.{CHILD}.{part}", (shape.heads, *columns)


def parse_attention(value: object, where: str) -> PackedAttention:
    """Return the entry as a value.

    Raises:
        CheckpointError: a missing or unknown key, or an unknown value.
    """
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {KEY} {value!r:.80}, wanted an object")
    where = f"{where}: {KEY}"
    check_keys(value, _KEYS, where, optional=(_STATIC, _RANK, _TWO_OF_FOUR, _PV, FORMATS))
    most = parse_format(value, where)
    min_keys, exclude = value["min_keys"], value["exclude"]
    if type(min_keys) is not int or min_keys < 1:
        raise CheckpointError(f"{where}: min_keys {min_keys!r:.80}, wanted 1 or more")
    if not _are_names(exclude):
        raise CheckpointError(f"{where}: exclude {exclude!r:.80}, wanted a list of globs")
    static = _parse_static(value[_STATIC], f"{where}: {_STATIC}") if _STATIC in value else {}
    ranks = _parse_ranks(value[_RANK], static, f"{where}: {_RANK}") if _RANK in value else {}
    fewer = _parse_names(value[_TWO_OF_FOUR], ranks, where) if _TWO_OF_FOUR in value else ()
    formats = parse_formats(value[FORMATS], where) if FORMATS in value else {}
    return PackedAttention(
        most.qk, min_keys, tuple(exclude), static, ranks, fewer, most.pv, formats
    )


def _parse_ranks(value: object, static: Mapping[str, HeadShape], where: str) -> dict[str, int]:
    from quantkit.numerics.attention_basis import is_rank

    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{where}: {value!r:.80}, wanted a list of ranks and their modules")
    ranks: dict[str, int] = {}
    for item in value:
        if not isinstance(item, Mapping):
            raise CheckpointError(f"{where}: {item!r:.80}, wanted an object")
        check_keys(item, _RANK_KEYS, where)
        rank = item["rank"]
        if type(rank) is not int or not is_rank(rank):
            raise CheckpointError(f"{where}: {rank!r:.40} columns, wanted a multiple of {COLUMNS}")
        modules = parse_modules(item["modules"], where, ranks)
        ranks |= dict.fromkeys(modules, rank)
        for name in static.keys() & set(modules):
            if rank >= static[name].head_size:
                raise CheckpointError(
                    f"{where}: {name:.80}: {rank} of {static[name].head_size} columns, wanted fewer"
                )
    return ranks


def _parse_names(value: object, ranks: Mapping[str, int], where: str) -> tuple[str, ...]:
    """Return the modules that multiply two of four columns, which have no rank."""
    return parse_modules(value, f"{where}: {_TWO_OF_FOUR} of those without a rank", ranks)


def _parse_static(value: object, where: str) -> dict[str, HeadShape]:
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{where}: {value!r:.80}, wanted a list of heads and their modules")
    static: dict[str, HeadShape] = {}
    for item in value:
        if not isinstance(item, Mapping):
            raise CheckpointError(f"{where}: {item!r:.80}, wanted an object")
        check_keys(item, _STATIC_KEYS, where)
        heads, head_size = item["heads"], item["head_size"]
        if any(type(size) is not int or size < 1 for size in (heads, head_size)):
            raise CheckpointError(
                f"{where}: {heads!r:.40} heads of {head_size!r:.40}, wanted 1 or more"
            )
        modules = parse_modules(item["modules"], where, static)
        static |= dict.fromkeys(modules, HeadShape(heads, head_size))
    return static


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
