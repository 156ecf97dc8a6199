"""Attention modules of a packed component whose formats differ from the component's default."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from quantkit.checkpoint.schemes import check_keys, parse_modules
from quantkit.errors import CheckpointError, RecipeError
from quantkit.numerics.attention_formats import NONE, AttentionFormat, attention_format

#: The key in the entry of attention.
KEY = "formats"
_KEYS = ("qk", "modules")
_PV = "pv"
#: The default format of probabilities and values.
_PV_CODES = "e4m3fn"


def format_to_json(found: AttentionFormat) -> dict[str, str]:
    """Return ``qk``, and ``pv`` where probabilities and values are in 16 bit."""
    return {"qk": found.qk, **({} if found.pv else {_PV: NONE})}


def parse_format(value: Mapping[str, Any], where: str) -> AttentionFormat:
    """Undo ``format_to_json``; other keys are ignored.

    Raises:
        CheckpointError: formats that are not known.
    """
    if value.get(_PV, NONE) != NONE:
        raise CheckpointError(
            f"{where}: pv {value[_PV]!r:.80}, expected {NONE} or no such key; upgrade quantkit"
        )
    try:
        return attention_format(value["qk"], None if _PV in value else _PV_CODES)
    except RecipeError as error:
        raise CheckpointError(f"{where}: {error}; upgrade quantkit") from error


def formats_to_json(formats: Mapping[str, AttentionFormat]) -> list[dict[str, Any]]:
    """Return a list of formats and their modules, which have names in order."""
    modules = sorted((found.name, name) for name, found in formats.items())
    return [
        {"modules": (names := [name for _, name in group]), **format_to_json(formats[names[0]])}
        for _, group in groupby(modules, key=lambda item: item[0])
    ]


def parse_formats(value: object, where: str) -> dict[str, AttentionFormat]:
    """Undo ``formats_to_json``.

    Raises:
        CheckpointError: no list, a missing or unknown key, or a module that comes twice.
    """
    where = f"{where}: {KEY}"
    if not isinstance(value, list) or not value:
        raise CheckpointError(
            f"{where}: {value!r:.80}, expected a list of formats and their modules"
        )
    formats: dict[str, AttentionFormat] = {}
    for item in value:
        if not isinstance(item, Mapping):
            raise CheckpointError(f"{where}: {item!r:.80}, expected an object")
        check_keys(item, _KEYS, where, optional=(_PV,))
        modules = parse_modules(item["modules"], where, formats)
        formats |= dict.fromkeys(modules, parse_format(item, where))
    return formats
