"""The tensors of a .safetensors file through the interface of single files, codes dequantized."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import ModelError, NonFiniteError
from quantkit.interchange.code_formats import FLOAT8
from quantkit.interchange.gguf_file import PLAIN, all_finite
from quantkit.interchange.pickled import refuse_pickle
from quantkit.interchange.safetensors_marks import Mark, Marking, find_marking
from quantkit.interchange.stored_file import CHUNK_VALUES, StoredFile, StoredTensor
from quantkit.storage.tensorfile import ITEM_BYTES, Header, TensorInfo, read_header

#: Torch's dtypes of scales and codes, by the names in a header.
_DTYPES = {
    **PLAIN,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class SafetensorsWeight:
    """A tensor of a .safetensors file."""

    path: Path
    info: TensorInfo
    #: of codes; None: plain numbers
    layer: "_Layer | None"
    problem: str

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As torch has it."""
        return self.info.shape if self.layer is None else self.layer.shape

    @property
    def dtype(self) -> str | None:
        """F32, F16 or BF16; None: codes."""
        return self.info.dtype if self.info.dtype in PLAIN else None

    @property
    def quantized(self) -> bool:
        """True for codes."""
        return self.dtype is None

    @property
    def block(self) -> int:
        """The number of values that are read together."""
        return 1 if self.layer is None else self.layer.mark.format.block(self.layer.told)

    def read(self, first: int, count: int) -> Iterator[Tensor]:
        """Yield numbers in order, flat: plain ones as they are, codes as float32.

        Raises:
            ModelError: the file has ended.
            NonFiniteError: NaN or infinity.
        """
        decode = self._plain if self.layer is None else self.layer.mark.format.open(self.layer)
        step = max(CHUNK_VALUES // self.block, 1) * self.block
        for begin in range(first, first + count, step):
            values = decode(begin, min(step, first + count - begin))
            if not all_finite(values):
                raise NonFiniteError(
                    f"{self.path}: {self.name}: NaN or infinity; take the file from elsewhere"
                )
            yield values

    def _plain(self, first: int, count: int) -> Tensor:
        values = read_numbers(self.path, self.info, first, count)
        return values.float() if self.dtype is None else values


@dataclass(frozen=True)
class _Layer:
    """The tensors of a layer with codes."""

    header: Header
    info: TensorInfo
    mark: Mark

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mark.shape_of(self.info)

    @property
    def told(self) -> Mapping[str, Any]:
        return self.mark.told

    def codes(self, first: int, count: int) -> Tensor:
        return read_numbers(self.header.path, self.info, first, count)

    def part(self, name: str) -> Tensor | None:
        if name not in self.mark.parts:
            return None
        info = self.header.tensors[self.mark.parts[name]]
        return read_numbers(self.header.path, info, 0, prod(info.shape)).reshape(info.shape)


def open_safetensors(path: Path) -> StoredFile:
    """Return the tensors of a .safetensors file, of which marked layers are dequantized.

    Raises:
        ModelError: no safetensors file, a damaged one, pickled, or quantized in a way that is not
            read.
    """
    refuse_pickle(path)
    header = read_header(path)
    for name in header.tensors:
        if not re.fullmatch(r"[\w./:-]{1,300}", name):
            raise ModelError(f"{path}: tensor {name!r:.80}, expected the dotted path of a tensor")
    marking = find_marking(header, lambda info: bytes(_bytes(path, info)))
    aside = {*marking.aside}
    for mark in marking.layers.values():
        aside.update((*mark.parts.values(), *mark.aside))
    tensors: dict[str, StoredTensor] = {
        name: _weight(header, info, marking)
        for name, info in header.tensors.items()
        if name not in aside
    }
    return StoredFile(path, marking.format, tensors, notes=_notes(header, marking))


def _weight(header: Header, info: TensorInfo, marking: Marking) -> SafetensorsWeight:
    layer = info.name.removesuffix(".weight")
    mark = marking.layers.get(layer) if layer != info.name else None
    if mark is not None:
        found = _Layer(header, info, mark)
        for name in mark.parts:
            _check_part(found, name)
        return SafetensorsWeight(header.path, info, found, "")
    problem = ""
    if info.dtype not in PLAIN and info.dtype not in FLOAT8:
        problem = (
            f"{info.dtype} without a marker that is known, expected F32, F16, BF16 or FP8; take "
            "another file of the model"
        )
    return SafetensorsWeight(header.path, info, None, problem)


def _check_part(layer: _Layer, name: str) -> None:
    """Refuse scales that are none."""
    info = layer.header.tensors[layer.mark.parts[name]]
    part = layer.mark.format.parts[name]
    if info.dtype not in part.dtypes:
        raise ModelError(
            f"{layer.header.path}: {info.name!r:.200}: a scale in {info.dtype}, expected "
            f"{' or '.join(part.dtypes)}; take another file of the model"
        )
    if part.signed or info.dtype not in PLAIN:
        # Values that are no numbers are found as the weight is read.
        return
    scale = layer.part(name)
    assert scale is not None
    if not all_finite(scale) or bool((scale < 0).any()):
        raise NonFiniteError(
            f"{layer.header.path}: {info.name!r:.200}: a scale that is negative or no number; take "
            "the file from elsewhere"
        )


def read_numbers(path: Path, info: TensorInfo, first: int, count: int) -> Tensor:
    """Return numbers of a tensor, flat, in their own dtype."""
    item = ITEM_BYTES[info.dtype]
    start = info.start + first * item
    data = np.fromfile(path, dtype=np.uint8, count=count * item, offset=start)
    if len(data) < count * item:
        raise ModelError(f"{path}: ends early, at {start + len(data)}; download it again")
    return torch.from_numpy(data).view(_DTYPES[info.dtype])


def _bytes(path: Path, info: TensorInfo) -> memoryview:
    data = np.fromfile(path, dtype=np.uint8, count=info.nbytes, offset=info.start)
    return data.data


def _notes(header: Header, marking: Marking) -> tuple[str, ...]:
    static = [
        name
        for mark in marking.layers.values()
        for name in mark.aside
        if name in header.tensors and "input" in name.rpartition(".")[2]
    ]
    if not static:
        return ()
    return (f"input scales of {len(static)} layers are left out: 'quantkit calibrate' finds new",)
