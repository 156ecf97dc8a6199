"""The attention of a packed component, as config.json has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.schemes import check_keys
from quantkit.errors import CheckpointError
from quantkit.numerics.attention import QK_FORMATS

#: The key in the quantization_config.
KEY = "attention"
_KEYS = ("qk", "min_keys", "exclude")


@dataclass(frozen=True)
class PackedAttention:
    """Attention on 8-bit codes, with factors of each call's own numbers."""

    #: of queries and keys
    qk: str
    #: attention over fewer keys is in 16 bit
    min_keys: int
    #: globs on modules whose attention is in 16 bit
    exclude: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return FORMAT.md's ``attention``."""
        return {"exclude": list(self.exclude), "min_keys": self.min_keys, "qk": self.qk}


def parse_attention(value: object, where: str) -> PackedAttention:
    """Return the entry as a value.

    Raises:
        CheckpointError: a missing or unknown key, or an unknown value.
    """
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {KEY} {value!r:.80}, wanted an object")
    check_keys(value, _KEYS, f"{where}: {KEY}")
    qk, min_keys, exclude = (value[key] for key in _KEYS)
    if qk not in QK_FORMATS:
        raise CheckpointError(
            f"{where}: {KEY}: qk {qk!r:.80}, wanted one of {', '.join(QK_FORMATS)}; upgrade "
            "quantkit"
        )
    if type(min_keys) is not int or min_keys < 1:
        raise CheckpointError(f"{where}: {KEY}: min_keys {min_keys!r:.80}, wanted 1 or more")
    if not isinstance(exclude, list) or not all(isinstance(glob, str) for glob in exclude):
        raise CheckpointError(f"{where}: {KEY}: exclude {exclude!r:.80}, wanted a list of globs")
    return PackedAttention(qk, min_keys, tuple(exclude))
