"""The attention of a packed component: its entry in config.json, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from quantkit.checkpoint.attention_exceptions import KEY as FORMATS
from quantkit.checkpoint.attention_exceptions import (
    format_to_json,
    formats_to_json,
    parse_format,
    parse_formats,
)
from quantkit.checkpoint.schemes import check_keys, parse_modules
from quantkit.errors import CheckpointError
from quantkit.numerics.attention_formats import AttentionFormat, attention_format

#: The key in the quantization_config.
KEY = "attention"
#: The child of an attention module that holds its scales, where they are static.
CHILD = "attention_scales"
_KEYS = ("qk", "min_keys", "exclude")
_STATIC = "static"
_STATIC_KEYS = ("heads", "head_size", "modules")
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

    def to_json(self) -> dict[str, Any]:
        """Return FORMAT.md's ``attention``."""
        value: dict[str, Any] = {"exclude": list(self.exclude), "min_keys": self.min_keys}
        static = {_STATIC: self._static_json()} if self.static else {}
        formats = {FORMATS: formats_to_json(self.formats)} if self.formats else {}
        return {**value, **format_to_json(self._format), **static, **formats}

    def __str__(self) -> str:
        """Return a line for people."""
        static = f", static scales in {len(self.static)} modules" if self.static else ""
        kept = f"; in 16 bit: {', '.join(self.exclude)}" if self.exclude else ""
        values = "" if self.pv else "; probabilities and values in 16 bit"
        names = [found.name for found in self.formats.values()]
        others = "".join(f"; {name} in {names.count(name)} modules" for name in sorted(set(names)))
        return (
            f"queries and keys in {self.qk} from {self.min_keys} keys on{static}{values}"
            f"{others}{kept}"
        )

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
        raise CheckpointError(f"{where}: {KEY} {value!r:.80}, expected an object")
    where = f"{where}: {KEY}"
    check_keys(value, _KEYS, where, optional=(_STATIC, _PV, FORMATS))
    most = parse_format(value, where)
    min_keys, exclude = value["min_keys"], value["exclude"]
    if type(min_keys) is not int or min_keys < 1:
        raise CheckpointError(f"{where}: min_keys {min_keys!r:.80}, expected 1 or more")
    if not _are_names(exclude):
        raise CheckpointError(f"{where}: exclude {exclude!r:.80}, expected a list of globs")
    static = _parse_static(value[_STATIC], f"{where}: {_STATIC}") if _STATIC in value else {}
    formats = parse_formats(value[FORMATS], where) if FORMATS in value else {}
    return PackedAttention(most.qk, min_keys, tuple(exclude), static, most.pv, formats)


def _parse_static(value: object, where: str) -> dict[str, HeadShape]:
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{where}: {value!r:.80}, expected a list of heads and their modules")
    static: dict[str, HeadShape] = {}
    for item in value:
        if not isinstance(item, Mapping):
            raise CheckpointError(f"{where}: {item!r:.80}, expected an object")
        check_keys(item, _STATIC_KEYS, where)
        heads, head_size = item["heads"], item["head_size"]
        if any(type(size) is not int or size < 1 for size in (heads, head_size)):
            raise CheckpointError(
                f"{where}: {heads!r:.40} heads of {head_size!r:.40}, expected 1 or more"
            )
        modules = parse_modules(item["modules"], where, static)
        static |= dict.fromkeys(modules, HeadShape(heads, head_size))
    return static


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
