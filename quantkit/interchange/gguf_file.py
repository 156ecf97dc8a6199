"""Reading .gguf files of denoisers: offsets of tensors, and their values, one tensor at a time."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import InputError, ModelError, NonFiniteError
from quantkit.interchange.gguf_header import (
    MAGIC,
    MAX_HEADER_BYTES,
    SHAPE_KEY,
    GgufHeader,
    HeaderTensor,
    walk_header,
)
from quantkit.storage.inputfile import open_file
from quantkit.storage.jsonfile import short

#: GGML types that are read: (values in a block, its bytes). What else there is, no denoiser has.
READABLE = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
#: Those without blocks, as torch has them.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: Values that are dequantized at a time: 4 MiB in float32.
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    #: GGML's name of it, one of READABLE
    type: str
    #: as torch has it, of the weight that it stands for
    shape: tuple[int, ...]
    #: absolute offset of the first byte in the file
    start: int
    nbytes: int

    @property
    def values(self) -> int:
        """The number of its values."""
        return prod(self.shape)

    def bytes_of(self, values: int) -> int:
        """Return the bytes that the first so many numbers take, whole blocks."""
        length, size = READABLE[self.type]
        assert values % length == 0, (self.name, values)
        return values // length * size


@dataclass(frozen=True)
class GgufFile:
    """The header of a file, and where its data begins."""

    path: Path
    #: general.architecture; empty when the file does not say
    architecture: str
    tensors: dict[str, GgufTensor]


def require_gguf() -> ModuleType:
    """Return the gguf package.

    Raises:
        InputError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            "GGUF files need the gguf package, which is not installed; pip install 'quantkit[gguf]'"
        ) from error
    module: ModuleType = gguf
    return module


def read_gguf(path: Path) -> GgufFile:
    """Return the header of a .gguf file.

    Raises:
        ModelError: missing, no GGUF, truncated, of a type that is not read, or tensors that do not
            lie one after another up to the end of the file.
        InputError: the gguf package is not installed.
    """
    require_gguf()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(size, MAX_HEADER_BYTES))
    if not data.startswith(MAGIC):
        raise ModelError(f"{path}: not a GGUF file; give a .gguf file, or a diffusers directory")
    try:
        header = walk_header(data)
        tensors = _placed(path, header, size)
    except ValueError as error:
        raise ModelError(
            f"{path}: truncated or damaged GGUF file ({short(error)}); download it again"
        ) from error
    return GgufFile(path, header.architecture, tensors)


def stored_bytes(file: GgufFile, start: int, nbytes: int) -> Tensor:
    """Return bytes of the file, uint8, from an absolute offset on.

    Raises:
        ModelError: the file has ended.
    """
    data = np.fromfile(file.path, dtype=np.uint8, count=nbytes, offset=start)
    if len(data) < nbytes:
        raise ModelError(f"{file.path}: ends early, at {start + len(data)}; download it again")
    return torch.from_numpy(data)


def dequantized(
    file: GgufFile, tensor: GgufTensor, values: int | None = None, first: int = 0
) -> Iterator[Tensor]:
    """Yield the numbers of a tensor in order, flat, a million at a time.

    Args:
        file: that holds it.
        tensor: one of its tensors.
        values: how many; None: all from ``first`` on.
        first: the first of them; both in whole blocks.

    Yields:
        in the dtype of the file, or float32 where numbers lie in blocks.

    Raises:
        ModelError: the file has ended.
        NonFiniteError: NaN or infinity.
    """
    length, _ = READABLE[tensor.type]
    stop = tensor.values if values is None else first + values
    for begin in range(first, stop, _CHUNK_VALUES):
        count = min(_CHUNK_VALUES, stop - begin)
        data = stored_bytes(file, tensor.start + tensor.bytes_of(begin), tensor.bytes_of(count))
        chunk = data.view(PLAIN[tensor.type]) if length == 1 else _decoded(data, tensor.type)
        if not all_finite(chunk):
            raise NonFiniteError(
                f"{file.path}: {tensor.name}: NaN or infinity; take the file from elsewhere"
            )
        yield chunk


def all_finite(values: Tensor) -> bool:
    """Tell whether no number is NaN or infinite: two reductions, without a mask in memory."""
    if values.numel() == 0:
        return True
    return isfinite(float(values.amin())) and isfinite(float(values.amax()))


def _decoded(data: Tensor, kind: str) -> Tensor:
    gguf = require_gguf()
    # As one long row: the package makes a call for every 16 rows.
    with np.errstate(all="ignore"):  # NaN and infinity are looked for by the caller
        values = gguf.dequantize(data.numpy().reshape(1, -1), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(-1)


def _placed(path: Path, header: GgufHeader, size: int) -> dict[str, GgufTensor]:
    """Return the tensors, which must lie one after another and fill the file."""
    tensors: dict[str, GgufTensor] = {}
    place, stop = 0, header.stop
    for row in header.tensors:
        if row.name in tensors:
            raise ValueError(f"tensor {row.name!r:.80} stands twice")
        tensor = _tensor(path, row, header)
        if row.offset != place:
            raise ValueError(f"{row.name} begins at byte {row.offset}, expected {place}")
        tensors[row.name] = tensor
        stop = tensor.start + tensor.nbytes
        place = header.aligned(place + tensor.nbytes)
    if size < stop:
        raise ValueError(f"{size} bytes, expected {stop}")
    if size > header.aligned(stop):
        raise ValueError(f"{size - stop} bytes after the last tensor")
    return tensors


def _tensor(path: Path, row: HeaderTensor, header: GgufHeader) -> GgufTensor:
    kind = _type_of(path, row)
    if not re.fullmatch(r"[\w.-]{1,200}", row.name):
        raise ModelError(f"{path}: tensor {row.name!r:.80}, expected the dotted path of a tensor")
    length, size = READABLE[kind]
    if (row.shape[-1] if row.shape else 1) % length:
        raise ValueError(f"{row.name}: rows of {row.shape[-1:]} cut blocks of {length}")
    shape = header.true_shapes.get(row.name, row.shape)
    if prod(shape) != prod(row.shape) or min(shape, default=0) < 0:
        raise ModelError(
            f"{path}: {row.name}: {SHAPE_KEY}* says {list(shape)}, which is not its size; download "
            "it again"
        )
    nbytes = prod(shape) // length * size
    return GgufTensor(row.name, kind, shape, header.data_start + row.offset, nbytes)


def _type_of(path: Path, row: HeaderTensor) -> str:
    """Return GGML's name of a tensor's type, which must be one that is read."""
    name = _type_names().get(row.type, f"number {row.type}")
    if name not in READABLE:
        raise ModelError(
            f"{path}: {row.name!r:.80}: type {name} is not read, expected one of "
            f"{', '.join(READABLE)}; take a file of another type"
        )
    return name


@lru_cache(maxsize=1)
def _type_names() -> dict[int, str]:
    return {int(kind): kind.name for kind in require_gguf().GGMLQuantizationType}
