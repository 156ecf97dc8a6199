"""Reading .gguf files of denoisers with the gguf package: headers, and tensors one at a time."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import InputError, ModelError, NonFiniteError
from quantkit.storage.inputfile import open_file
from quantkit.storage.jsonfile import short

#: GGML types that are read: (values in a block, its bytes). What else there is, no denoiser has.
READABLE = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}  # fmt: skip
#: Those without blocks, as torch has them.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: ComfyUI-GGUF's true shape of a tensor that was cut into rows of another length.
SHAPE_KEY = "comfy.gguf.orig_shape."
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
        """How many numbers it holds."""
        return prod(self.shape)

    def bytes_of(self, values: int) -> int:
        """Return the bytes that the first so many numbers take, whole blocks."""
        length, size = READABLE[self.type]
        assert values % length == 0, (self.name, values)
        return values // length * size


@dataclass(frozen=True)
class GgufFile:
    """What the header of a file says."""

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
        ModelError: missing, no GGUF, truncated, of a type that is not read.
        InputError: the gguf package is not installed.
    """
    require_gguf()
    with open_file(path) as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file; give a .gguf file, or a diffusers directory")
    try:
        return _read(path)
    except ModelError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        # What the package raises depends on the byte where it stumbles.
        raise ModelError(
            f"{path}: truncated or damaged GGUF file ({short(error)}); download it again"
        ) from error


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


def _read(path: Path) -> GgufFile:
    reader = _checked_reader(path)
    if reader.byte_order != "I" or sys.byteorder != "little":
        raise ModelError(f"{path}: big-endian, wanted little-endian; download another file")
    field = reader.get_field("general.architecture")
    shapes = {
        name.removeprefix(SHAPE_KEY): tuple(int(size) for size in value.contents())
        for name, value in reader.fields.items()
        if name.startswith(SHAPE_KEY)
    }
    tensors = {t.name: _tensor(path, t, shapes.get(t.name)) for t in reader.tensors}
    return GgufFile(path, "" if field is None else str(field.contents()), tensors)


def _checked_reader(path: Path) -> Any:
    """Return the package's reader, which takes what lies past the end of a file for empty."""
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]  # the package is not typed for mypy here
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            stop = int(offset) + int(np.dtype(dtype).itemsize) * int(count)
            if not int(offset) <= stop <= len(self.data):
                raise ValueError(f"{len(self.data)} bytes, wanted {stop}")
            return super()._get(offset, dtype, count, override_order)

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            for field in fields:
                _refuse_type(path, field)
            super()._build_tensors(start_offs, fields)

    return Reader(path)


def _refuse_type(path: Path, field: Any) -> None:
    """Refuse a tensor before the reader looks for its data: it knows no type but its own."""
    gguf = require_gguf()
    number = int(field.parts[4][0])
    names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    name = names.get(number, f"number {number}")
    if name not in READABLE:
        raise ModelError(
            f"{path}: {field.name!r:.80}: type {name} is not read, wanted one of "
            f"{', '.join(READABLE)}; take a file of another type"
        )


def _tensor(path: Path, found: Any, true_shape: tuple[int, ...] | None) -> GgufTensor:
    shape = tuple(int(size) for size in reversed(found.shape.tolist()))
    if not re.fullmatch(r"[\w.-]{1,200}", found.name):
        raise ModelError(f"{path}: tensor {found.name!r:.80}, wanted the dotted path of a tensor")
    if true_shape is not None and prod(true_shape) != prod(shape):
        raise ModelError(
            f"{path}: {found.name}: {SHAPE_KEY}* says {list(true_shape)}, which is not its size; "
            "download it again"
        )
    return GgufTensor(
        found.name,
        found.tensor_type.name,
        true_shape or shape,
        int(found.data_offset),
        int(found.n_bytes),
    )
