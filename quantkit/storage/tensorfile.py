"""The header of a safetensors file, read without torch and without mapping the data.

The safetensors library reads and writes whole tensors; streaming needs the byte offsets.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import InputError, ModelError
from quantkit.storage.inputfile import open_file
from quantkit.storage.jsonfile import parse_json, short
from quantkit.storage.system import read_at

#: Bytes of one element, by the dtype's name in the header.
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip

#: The library reads up to 100 MB, of which hostile ones take gigabytes to parse. The header of a
#: model of 90,000 tensors, as many as ``jsonfile`` allows, is smaller than this.
MAX_HEADER_BYTES = 32 * 2**20

#: Keys of ``__metadata__``. Trainers of LoRA write a hundred.
MAX_METADATA = 10_000
#: Axes of a tensor, as torch's. Sizes of a million axes multiply to a number of as many words.
MAX_RANK = 64

#: Headers that are not parsed again: those of the shards of a model.
_KEPT = 16


@dataclass(frozen=True)
class TensorInfo:
    """One row of the header."""

    name: str
    #: the header's name of it, as F16 or F8_E4M3
    dtype: str
    shape: tuple[int, ...]
    #: absolute offset of the first byte in the file
    start: int
    #: absolute offset past the last byte
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """The tensors of one file in file order, and its metadata."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path, *, error: type[InputError] = ModelError) -> Header:
    """Return the header of ``path``, if the safetensors library would read the file, too.

    Args:
        path: the file.
        error: what to raise.

    Raises:
        InputError: of class ``error``: not a safetensors file, truncated, or a header that
            contradicts itself.
    """
    with open_file(path, error=error) as file:
        text = _read(path, file, error)
        size = os.fstat(file.fileno()).st_size
    # mypy takes the hash of its instances for that of a class.
    return _judged(path, size, text, error)  # type: ignore[arg-type]


def read_bytes(info: TensorInfo, descriptor: int) -> bytes:
    """Return the data of one tensor from an open file."""
    return read_at(descriptor, info.nbytes, info.start)


def _read(path: Path, file: BinaryIO, error: type[InputError]) -> bytes:
    """Return the JSON of a header."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise error(
            f"{path}: truncated or not safetensors: {size} bytes, header claims {length}; "
            "download or write it again"
        )
    if length > MAX_HEADER_BYTES:
        raise error(f"{path}: header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
    return file.read(length)


@lru_cache(maxsize=_KEPT)
def _judged(path: Path, size: int, text: bytes, error: type[InputError]) -> Header:
    """Return a header of these bytes, which one command asks for several times."""
    header = _parsed(path, size, text, error)
    _ask_library(path, text, error)
    return header


def _parsed(path: Path, size: int, text: bytes, error: type[InputError]) -> Header:
    try:
        table = parse_json(text)
    except ValueError as reason:
        raise error(f"{path}: damaged header ({short(reason)}); write it again") from reason
    try:
        return _checked(path, size, 8 + len(text), table)
    except ValueError as reason:
        raise error(f"{path}: {short(reason)}; download or write it again") from reason


def _ask_library(path: Path, text: bytes, error: type[InputError]) -> None:
    """Check the header with the library too: no loader reads what it refuses.

    It gets the header alone, so that it misses the data, which it says when all else is right:
    opening the file by it would import numpy, which takes longer than packing a small model.
    """
    complaint = _complaint(text)
    if complaint not in ("", _lacks_data()):
        raise error(f"{path}: not safetensors ({complaint}); download or write it again")


def _complaint(text: bytes) -> str:
    """Return the library's message on a header without its data."""
    from safetensors import SafetensorError, deserialize

    try:
        deserialize(len(text).to_bytes(8, "little") + text)  # type: ignore[no-untyped-call]
    except SafetensorError as reason:
        return short(reason)
    return ""


@lru_cache(maxsize=1)
def _lacks_data() -> str:
    """Return the library's message for data that is missing after a valid header."""
    return _complaint(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}')


def _checked(path: Path, size: int, base: int, table: object) -> Header:
    """Return the header, whose rows must cover the file without gaps; ValueError otherwise."""
    if not isinstance(table, dict):
        # ValueError like every other breach, for the one place that adds the file's name
        raise ValueError(f"the header is {type(table).__name__}, expected an object")  # noqa: TRY004
    metadata = _metadata(table.pop("__metadata__", {}))
    rows = [_row(base, name, entry) for name, entry in table.items()]
    # Empty tensors share their start with the next one.
    rows.sort(key=lambda row: (row.start, row.stop))
    position = base
    for row in rows:
        if row.start != position:
            raise ValueError(f"{row.name!r:.80}: data starts at {row.start}, expected {position}")
        position = row.stop
    if position != size:
        raise ValueError(f"truncated or padded: {size} bytes, header says {position}")
    return Header(path, {row.name: row for row in rows}, metadata)


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("__metadata__ holds more than texts")
    if len(value) > MAX_METADATA:
        raise ValueError(f"__metadata__ has {len(value):,} keys, expected at most {MAX_METADATA:,}")
    return value


def _row(base: int, name: str, entry: object) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop], **rest} if (
            not rest
            and dtype in ITEM_BYTES
            and len(shape) <= MAX_RANK
            and _are_sizes([*shape, start, stop])
        ):
            row = TensorInfo(name, dtype, tuple(shape), base + start, base + stop)
        case _:
            raise ValueError(f"{name!r:.80}: damaged header entry {entry!r:.200}")
    expected = prod(row.shape) * ITEM_BYTES[dtype]
    if row.nbytes != expected:
        raise ValueError(
            f"{name!r:.80}: {row.nbytes} bytes, {dtype} {list(shape)!s:.80} takes {expected!s:.40}"
        )
    return row


def _are_sizes(values: list[object]) -> bool:
    # bool is an int to Python, but true is no size to JSON.
    return all(type(value) is int and 0 <= value < 2**63 for value in values)
