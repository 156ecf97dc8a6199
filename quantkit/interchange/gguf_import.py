"""The tensors of a .gguf file through the interface of single files.

The blocks of Q4_0 and Q8_0 stay where they are, in the file, and ``blocks_of`` says where: packing
copies them. The 16-bit weights serve everything else, and to run the pipeline.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor

from quantkit.interchange.gguf_file import (
    PLAIN,
    READABLE,
    GgufFile,
    GgufTensor,
    dequantized,
    read_gguf,
)
from quantkit.interchange.single_file_model import SingleFileModel
from quantkit.interchange.stored_file import StoredFile
from quantkit.models.source import StoredBlocks
from quantkit.numerics.formats import FORMATS


@dataclass(frozen=True)
class GgufWeight:
    """A tensor of a .gguf file, whose numbers are dequantized to float16."""

    file: GgufFile
    stored: GgufTensor
    problem: str = ""

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As torch has it."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """The dtype of its values when they are read."""
        return self.stored.type if self.stored.type in PLAIN else "F16"

    @property
    def quantized(self) -> bool:
        """True where numbers lie in blocks."""
        return self.stored.type not in PLAIN

    @property
    def block(self) -> int:
        """The number of values that share a scale."""
        return READABLE[self.stored.type][0]

    def read(self, first: int, count: int) -> Iterator[Tensor]:
        """Yield numbers in order; see ``dequantized``."""
        return dequantized(self.file, self.stored, count, first)


def open_gguf(path: Path) -> StoredFile:
    """Return the tensors of a .gguf file.

    Raises:
        ModelError: no GGUF file, or a damaged one.
        InputError: the gguf package is not installed.
    """
    file = read_gguf(path)
    tensors = {name: GgufWeight(file, tensor) for name, tensor in file.tensors.items()}
    return StoredFile(path, "GGUF", tensors, file.architecture)


def blocks_of(model: SingleFileModel) -> dict[str, StoredBlocks]:
    """Return the layers whose blocks quantkit packs as they are, by module path."""
    found = {}
    for piece in model.denoiser.pieces:
        if not isinstance(piece.tensor, GgufWeight):
            continue
        stored = piece.tensor.stored
        fmt = FORMATS.get(stored.type.lower())
        windows = prod(piece.shape[2:])
        if fmt is None or windows > 1 or len(piece.shape) < 2 or piece.shape[1] % fmt.block:
            continue
        spans = tuple(
            (stored.start + stored.bytes_of(first), stored.start + stored.bytes_of(first + count))
            for first, count in piece.runs
        )
        layer = piece.name.removesuffix(".weight")
        found[layer] = StoredBlocks(model.file.path, fmt.name, spans)
    return found
