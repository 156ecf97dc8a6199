"""Size limits of a model: no larger than its files, whose headers list the tensors.

The numbers of a config.json decide how many modules are built: a hostile one costs minutes and all
memory before anything else could be compared.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import get_ident
from typing import Any

from quantkit.errors import CheckpointError, InputError
from quantkit.storage.jsonfile import read_json
from quantkit.storage.tensorfile import read_header

#: What a config calls how often it repeats a part that has tensors of its own.
_REPEATS = re.compile(r"(?:.*_)?(?:layers|blocks|depths?|layers_per_block)")


def most_modules(tensors: int) -> int:
    """Return how many modules a model may have whose files hold so many tensors.

    Of published models Flux2 has the most: 701 modules and 331 tensors. Tiny models have more.
    """
    return 2 * tensors + 1000


def tensors_below(folder: Path) -> int:
    """Return how many tensors the safetensors files below a folder hold; damaged ones none."""
    count = 0
    for path in folder.rglob("*.safetensors"):
        with contextlib.suppress(InputError):
            count += len(read_header(path).tensors)
    return count


def oversized(config: Mapping[str, Any], tensors: int) -> str:
    """Return which number of a config asks for more than its files hold; empty when none does.

    Some constructors make a list of such a length before the first module.

    Args:
        config: config.json, or a part of it.
        tensors: of the files.
    """
    most = most_modules(tensors)
    for key, value in config.items():
        values = value if isinstance(value, list) else [value]
        if len(values) > most:
            return f"{key:.80} has {len(values):,} entries, but its files hold {tensors:,} tensors"
        for item in values:
            is_number = isinstance(item, int | float) and _REPEATS.fullmatch(key)
            if is_number and item > most:
                return f"{key:.80} is {item!s:.40}, but its files hold {tensors:,} tensors"
            if isinstance(item, Mapping) and (found := oversized(item, tensors)):
                return found
    return ""


def refuse_oversized(config: Path) -> None:
    """Refuse a config.json that asks for more than the files next to it hold.

    Raises:
        CheckpointError: naming the number.
    """
    values = read_json(config, error=CheckpointError)
    if problem := oversized(values, tensors_below(config.parent)):
        raise CheckpointError(f"{config}: {problem}; download it again")


@contextlib.contextmanager
def at_most(count: int, *, of: Path | None = None) -> Iterator[None]:
    """Let the body build so many modules, and as many parameters, in this thread.

    Args:
        count: of them.
        of: whose files they are, for the message.

    Raises:
        ValueError: from the constructor that wants one more, where it is not said of what.
        CheckpointError: from it, else.
    """
    from torch.nn.modules.module import (
        register_module_module_registration_hook,
        register_module_parameter_registration_hook,
    )

    thread, built = get_ident(), {"modules": 0, "parameters": 0}

    def counter(what: str) -> Any:
        def hook(parent: object, name: str, child: object) -> None:
            del parent, name, child
            if get_ident() != thread:
                return
            built[what] += 1
            if built[what] > count:
                problem = f"more than {count:,} {what}, which its files have no tensors for"
                if of is None:
                    raise ValueError(problem)
                raise CheckpointError(f"{of}: {problem}; download it or pack the model again")

        return hook

    handles = (
        register_module_module_registration_hook(counter("modules")),
        register_module_parameter_registration_hook(counter("parameters")),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
