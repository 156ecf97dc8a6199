"""The interface of single files of any format: tensors by name, read a million values at a time.

``gguf_import`` and ``safetensors_import`` make it; ``single_file_model`` fits it to a config.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

#: Numbers that are read at a time: 4 MiB in float32.
CHUNK_VALUES = 1 << 20


class StoredTensor(Protocol):
    """A tensor of the file, as the weight that it stands for."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As torch has it."""

    @property
    def dtype(self) -> str | None:
        """F32, F16 or BF16, in which its numbers are; None: codes, of which the model decides."""

    @property
    def quantized(self) -> bool:
        """True for codes and blocks."""

    @property
    def block(self) -> int:
        """The number of values that are read together."""

    @property
    def problem(self) -> str:
        """The reason that it cannot be read; empty when it can."""

    def read(self, first: int, count: int) -> Iterator[Tensor]:
        """Yield numbers in order, flat, float32 or of ``dtype``; both in whole blocks.

        Raises:
            ModelError: the file has ended.
            NonFiniteError: NaN or infinity.
        """


@dataclass(frozen=True)
class StoredFile:
    """The tensors of a single file."""

    path: Path
    #: in words, as "ComfyUI's scaled FP8"
    format: str
    tensors: Mapping[str, StoredTensor]
    #: the file's name of its model, if it has one
    architecture: str = ""
    #: omissions, a line each
    notes: tuple[str, ...] = ()
