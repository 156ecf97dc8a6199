"""The mapping from a model's tensors to ranges of values of a single file."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from quantkit.errors import CheckpointError, ModelError
from quantkit.interchange.layout_names import OriginalTensor
from quantkit.interchange.stored_file import StoredFile, StoredTensor
from quantkit.models.building import read_skeleton
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.storage.jsonfile import read_json


@dataclass(frozen=True)
class ModelShapes:
    """The model of a config.json."""

    folder: Path
    class_name: str
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Naming:
    """The naming of a model's tensors in a file."""

    #: the original layout's name, or "diffusers"
    layout: str
    prefix: str
    tensors: tuple[OriginalTensor, ...]
    #: tensors that the file may have besides and no program reads, without the prefix
    unused: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """The names that the file must have."""
        return {self.prefix + tensor.name for tensor in self.tensors}


@dataclass(frozen=True)
class Piece:
    """A tensor of diffusers and where its rows are."""

    name: str
    shape: tuple[int, ...]
    tensor: StoredTensor
    #: (first, number) of the tensor's numbers, in the order of the rows
    runs: tuple[tuple[int, int], ...]
    #: F32, F16 or BF16
    dtype: str
    #: the file has its columns as rows
    transposed: bool = False

    @property
    def quantized(self) -> bool:
        """True where the file has codes."""
        return self.tensor.quantized


def describe(
    folder: Path, tensors: int, *, class_name: str = "", names: Collection[str] = ()
) -> ModelShapes:
    """Return the model of a directory.

    Args:
        folder: with its config.json.
        tensors: how many the file has, than which no model is larger.
        class_name: of a model of transformers; "": the config says the class in diffusers.
        names: tensors of the files of a model of transformers, in whose names it is told.

    Raises:
        ModelError: packed, or no model can be built from it.
    """
    config = folder / "config.json"
    told = read_json(config)
    if CONFIG_KEY in told:
        raise ModelError(f"{folder}: packed; give the directory of the 16-bit pipeline as config")
    try:
        shapes = read_skeleton(config, class_name, names, tensors=tensors).tensors
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    return ModelShapes(folder, class_name or f"{told.get('_class_name')!s:.80}", shapes)


def own_names(names: Collection[str]) -> tuple[OriginalTensor, ...]:
    """Return the naming of a file that has the model's own names."""
    return tuple(OriginalTensor(name, (name,), swapped=False) for name in names)


def pieces_of(file: StoredFile, naming: Naming, described: ModelShapes) -> tuple[Piece, ...]:
    """Return the tensors of a model, all of which the file has.

    Raises:
        ModelError: one that cannot be read, or of another shape.
    """
    usual = _usual_dtype(file, naming)
    return tuple(p for o in naming.tensors for p in _pieces(file, naming, o, described, usual))


def _usual_dtype(file: StoredFile, naming: Naming) -> str:
    """Return the 16-bit dtype of most of a model's numbers; of codes alone: BF16."""
    count = {"BF16": 0, "F16": 0}
    for name in naming.names:
        tensor = file.tensors[name]
        if tensor.dtype in count:
            count[tensor.dtype] += prod(tensor.shape)
    return max(count, key=lambda name: count[name])


def _pieces(
    file: StoredFile,
    naming: Naming,
    original: OriginalTensor,
    described: ModelShapes,
    usual: str,
) -> Iterator[Piece]:
    """Yield the parts of one tensor of the file."""
    tensor = file.tensors[naming.prefix + original.name]
    if tensor.problem:
        raise ModelError(f"{file.path}: {tensor.name}: {tensor.problem}")
    parts = [described.shapes[name] for name in original.parts]
    whole = parts[0] if len(parts) == 1 else (sum(p[0] for p in parts), *parts[0][1:])
    _check_shape(file, tensor, whole[::-1] if original.transposed else whole, described)
    row = prod(whole[1:])
    cut = len(parts) > 1 or original.swapped
    _check_blocks(file, tensor, row if cut else prod(whole))
    first = 0
    for name, shape in zip(original.parts, parts, strict=True):
        count = prod(shape)
        half = shape[0] // 2 * row if original.swapped else 0
        runs = ((first + half, count - half), (first, half)) if half else ((first, count),)
        yield Piece(name, shape, tensor, runs, tensor.dtype or usual, original.transposed)
        first += count


def _check_shape(
    file: StoredFile, tensor: StoredTensor, whole: tuple[int, ...], described: ModelShapes
) -> None:
    """Refuse another shape, but for sizes of one: the numbers and their order are the same.

    ggml drops those that torch has first, and a VAE's Linear layers may be 1x1 convolutions.
    """
    if _without_ones(tensor.shape) != _without_ones(whole):
        raise ModelError(
            f"{file.path}: {tensor.name}: shape {list(tensor.shape)}, the model of "
            f"{described.folder} has {list(whole)}; give the pipeline that the file belongs to",
            fields=("config",),
        )


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _check_blocks(file: StoredFile, tensor: StoredTensor, numbers: int) -> None:
    if numbers % tensor.block:
        raise ModelError(
            f"{file.path}: {tensor.name}: {numbers} numbers cut blocks of {tensor.block}; download "
            "it again"
        )
