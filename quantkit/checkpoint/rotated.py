"""Which attention modules of a component have another basis than the published model's.

What adds to their queries or keys was trained in the old basis, and would add numbers that mean
nothing in the new one. So the modules are named twice: in the config.json of the 16-bit component
that ``quantkit rotate`` writes, and in the quantization_config of what is packed of it.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, ModelError
from quantkit.storage.jsonfile import read_json

#: The key in the quantization_config.
KEY = "rotated"
#: The key in a 16-bit component's config.json: diffusers warns of unknown keys without underscore,
#: and carries those with one along.
SOURCE_KEY = "_quantkit_rotated"


def parse_rotated(value: object, where: str) -> tuple[str, ...]:
    """Return the modules of the quantization_config's entry, ascending.

    Raises:
        CheckpointError: no list of modules, or one twice.
    """
    if not _are_modules(value):
        raise CheckpointError(
            f"{where}: {KEY} {value!r:.80}, wanted a list of modules, each once; pack the model "
            "again"
        )
    return _ascending(value)


def rotated_modules(config: Path) -> tuple[str, ...]:
    """Return the modules that a 16-bit component's config.json names, ascending; none: no key.

    Raises:
        ModelError: the file cannot be read, no list of modules, or one twice.
    """
    values = read_json(config)
    if SOURCE_KEY not in values:
        return ()
    if not _are_modules(values[SOURCE_KEY]):
        raise ModelError(
            f"{config}: {SOURCE_KEY} {values[SOURCE_KEY]!r:.80}, wanted a list of modules, each "
            "once; run 'quantkit rotate' again"
        )
    return _ascending(values[SOURCE_KEY])


def write_rotated_modules(config: Path, modules: Iterable[str]) -> None:
    """Name modules in a component's config.json, beside those that it names already.

    Raises:
        ModelError: the file cannot be read, or names no modules where it should.
    """
    values: dict[str, Any] = dict(read_json(config))
    is_sorted = list(values) == sorted(values)
    values[SOURCE_KEY] = sorted({*rotated_modules(config), *modules})
    text = json.dumps(values, indent=2, sort_keys=is_sorted) + "\n"
    config.write_text(text, encoding="utf-8")


def rotated_to_json(modules: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the quantization_config's entry; empty without modules."""
    return {KEY: list(modules)} if modules else {}


def _are_modules(value: object) -> bool:
    named = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    return named and 0 < len(set(value)) == len(value)  # type: ignore[call-overload, arg-type]


def _ascending(value: Any) -> tuple[str, ...]:
    return tuple(sorted(value))
