"""Offsets of the tensors of a safetensors file, computed before their data exists.

The bytes are those that the safetensors library writes for the same tensors, with one choice where
the library has none: it writes the metadata keys in random order, here they ascend.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.spec import TensorSpec
from quantkit.device.host.hashing import new_digest
from quantkit.storage.system import start_writing, write_at

#: File order of dtypes: the library sorts by its enumeration, descending, so that every tensor is
#: aligned to its item. Source: safetensors 0.8.0, observed; the tests compare with the library.
DTYPE_ORDER = (
    "U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ",
    "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
)  # fmt: skip

#: The data starts at a multiple of this; the header is padded with spaces.
ALIGNMENT = 8

#: Bytes after which the disk is told to begin: many enough for one request to be worth it.
_BEGUN_BYTES = 8 << 20


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the file."""

    spec: TensorSpec
    #: absolute offset of the first byte
    start: int
    #: absolute offset past the last byte
    stop: int


def file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the tensors as the library orders them: by dtype, then by name (bytewise)."""
    return sorted(specs, key=lambda spec: (DTYPE_ORDER.index(spec.dtype), spec.name.encode()))


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return everything before the data: the length, the JSON, the padding.

    Args:
        specs: the tensors of the file, in any order.
        metadata: text to text.
    """
    table: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    position = 0
    for spec in file_order(specs):
        stop = position + spec.nbytes
        offsets = [position, stop]
        table[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        position = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def place(specs: Sequence[TensorSpec], header_bytes: int) -> dict[str, Slot]:
    """Return the place of every tensor in a file whose header takes ``header_bytes``."""
    slots, position = {}, header_bytes
    for spec in file_order(specs):
        slots[spec.name] = Slot(spec, position, position + spec.nbytes)
        position = slots[spec.name].stop
    return slots


class Sink:
    """Takes the bytes of one tensor in order, puts them in its slot and hashes them."""

    def __init__(self, descriptor: int, slot: Slot) -> None:
        self._descriptor = descriptor
        self._slot = slot
        self._position = slot.start
        #: up to here the disk has begun
        self._begun = slot.start
        #: of the bytes so far
        self.digest = new_digest()

    def append(self, data: memoryview) -> None:
        """Hash and write the next bytes of the tensor."""
        data = data.cast("B")
        self.digest.update(data)
        self.write(data)

    def write(self, data: memoryview) -> None:
        """Write the next bytes of the tensor, which ``digest`` has or gets from the caller."""
        assert self._position + len(data) <= self._slot.stop, self._slot.spec.name
        write_at(self._descriptor, data, self._position)
        self._position += len(data)
        if self._position - self._begun >= _BEGUN_BYTES:
            self._begin()

    def close(self) -> str:
        """Return the SHA-256 of the whole tensor, in hex."""
        assert self._position == self._slot.stop, self._slot.spec.name
        self._begin()
        return self.digest.hexdigest()

    def _begin(self) -> None:
        start_writing(self._descriptor, self._begun, self._position - self._begun)
        self._begun = self._position
