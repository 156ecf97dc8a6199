"""The header of a safetensors file, read without torch and without mapping the data.

The safetensors library reads and writes whole tensors; streaming needs the byte offsets.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from quantkit.errors import ModelError

#: Bytes of one element, by the dtype's name in the header.
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip

#: The library refuses larger headers, so a larger number means a damaged file.
MAX_HEADER_BYTES = 100_000_000


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


def read_header(path: Path) -> Header:
    """Return the header of ``path``.

    Raises:
        ModelError: not a safetensors file, truncated, or a header that contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(
                    f"{path}: truncated or not safetensors: {size} bytes, header claims {length}; "
                    "download or write it again"
                )
            table = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: missing; download or write it again") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: damaged safetensors header ({error})") from error
    return _checked(path, size, 8 + length, table)


def read_bytes(info: TensorInfo, descriptor: int) -> bytes:
    """Return the data of one tensor from an open file."""
    return os.pread(descriptor, info.nbytes, info.start)


def _checked(path: Path, size: int, base: int, table: object) -> Header:
    if not isinstance(table, dict):
        raise ModelError(f"{path}: damaged safetensors header: found {type(table).__name__}")
    metadata = table.pop("__metadata__", {})
    rows = [_row(path, base, name, entry) for name, entry in table.items()]
    rows.sort(key=lambda row: row.start)
    position = base
    for row in rows:
        if row.start != position:
            raise ModelError(f"{path}: {row.name}: data starts at {row.start}, wanted {position}")
        position = row.stop
    if position != size:
        raise ModelError(
            f"{path}: truncated or padded: {size} bytes, header wants {position}; "
            "download or write it again"
        )
    return Header(path, {row.name: row for row in rows}, metadata)


def _row(path: Path, base: int, name: str, entry: object) -> TensorInfo:
    try:
        assert isinstance(entry, dict)
        start, stop = entry["data_offsets"]
        row = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), base + start, base + stop)
        wanted = prod(row.shape) * ITEM_BYTES[row.dtype]
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {name}: damaged header entry {entry!r}") from error
    if row.nbytes != wanted:
        raise ModelError(
            f"{path}: {name}: {row.nbytes} bytes, {row.dtype} {row.shape} wants {wanted}"
        )
    return row
