"""The tensors of a .safetensors file through the interface of single files, codes dequantized."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import ModelError, NonFiniteError
from quantkit.interchange.gguf_file import PLAIN, all_finite
from quantkit.interchange.safetensors_marks import FLOAT8, Mark, Marking, find_marking
from quantkit.interchange.stored_file import CHUNK_VALUES, StoredFile, StoredTensor
from quantkit.storage.inputfile import open_file
from quantkit.storage.tensorfile import ITEM_BYTES, Header, TensorInfo, read_header

#: Torch's dtypes of scales and codes, by the names in a header.
_DTYPES = {
    **PLAIN,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
}
_PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
#: What files of torch.save begin with: a zip archive, or a pickle of protocol 2.
_PICKLED = (b"PK\x03\x04", b"\x80\x02")


@dataclass(frozen=True)
class SafetensorsWeight:
    """A tensor of a .safetensors file."""

    path: Path
    info: TensorInfo
    #: of codes: (1) or (rows), float32; None: plain numbers
    scale: Tensor | None
    problem: str

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As torch has it."""
        return self.info.shape

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
        """Every number stands for itself."""
        return 1

    def read(self, first: int, count: int) -> Iterator[Tensor]:
        """Yield numbers in order, flat: plain ones as they are, codes as float32.

        Raises:
            ModelError: the file has ended.
            NonFiniteError: NaN or infinity.
        """
        for begin in range(first, first + count, CHUNK_VALUES):
            size = min(CHUNK_VALUES, first + count - begin)
            values = _numbers(self.path, self.info, begin, size)
            if self.dtype is None:
                values = values.float()
            if self.scale is not None:
                values = values * self._scales(begin, size)
            if not all_finite(values):
                raise NonFiniteError(
                    f"{self.path}: {self.name}: NaN or infinity; take the file from elsewhere"
                )
            yield values

    def _scales(self, begin: int, size: int) -> Tensor:
        """Return the scales of so many numbers."""
        assert self.scale is not None
        if self.scale.numel() == 1:
            return self.scale
        row = prod(self.shape[1:])
        return self.scale[torch.arange(begin, begin + size) // row]


def open_safetensors(path: Path) -> StoredFile:
    """Return the tensors of a .safetensors file, of which marked layers are dequantized.

    Raises:
        ModelError: no safetensors file, a damaged one, pickled, or quantized in a way that is not
            read.
    """
    _refuse_pickle(path)
    header = read_header(path)
    for name in header.tensors:
        if not re.fullmatch(r"[\w./:-]{1,300}", name):
            raise ModelError(f"{path}: tensor {name!r:.80}, expected the dotted path of a tensor")
    marking = find_marking(header, lambda info: bytes(_bytes(path, info)))
    aside = {*marking.aside}
    for mark in marking.layers.values():
        aside.update((mark.scale, *mark.aside))
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
        return SafetensorsWeight(header.path, info, _scale_of(header, mark), "")
    problem = ""
    if info.dtype not in PLAIN and info.dtype not in FLOAT8:
        problem = (
            f"{info.dtype} without a marker that is known, expected F32, F16, BF16 or FP8; take "
            "another file of the model"
        )
    return SafetensorsWeight(header.path, info, None, problem)


def _scale_of(header: Header, mark: Mark) -> Tensor:
    info = header.tensors[mark.scale]
    if info.dtype not in PLAIN:
        raise ModelError(
            f"{header.path}: {info.name!r:.200}: a scale in {info.dtype}, expected F32; take "
            "another file of the model"
        )
    scale = _numbers(header.path, info, 0, prod(info.shape)).float()
    if not all_finite(scale) or bool((scale < 0).any()):
        raise NonFiniteError(
            f"{header.path}: {info.name!r:.200}: a scale that is negative or no number; take the "
            "file from elsewhere"
        )
    return scale


def _numbers(path: Path, info: TensorInfo, first: int, count: int) -> Tensor:
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


def _refuse_pickle(path: Path) -> None:
    with open_file(path) as file:
        begin = file.read(4)
    if path.suffix in _PICKLES or begin.startswith(_PICKLED):
        raise ModelError(
            f"{path}: pickled, which runs what its author wrote into it when it is read; take the "
            ".safetensors file of the model"
        )
