"""A .gguf file as a diffusers directory: its denoiser in 16 bit, the rest from a pipeline.

The blocks of Q4_0 and Q8_0 stay where they are, in the file, and ``blocks_of`` says where: packing
copies them. The 16-bit weights serve everything else, and to run the pipeline.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.layout import Slot, encode_header, place
from quantkit.checkpoint.spec import CONFIG_KEY, TensorSpec
from quantkit.errors import CheckpointError, ModelError, NonFiniteError
from quantkit.interchange.gguf_file import (
    PLAIN,
    READABLE,
    GgufFile,
    GgufTensor,
    all_finite,
    dequantized,
    read_gguf,
)
from quantkit.interchange.layout_names import (
    OriginalTensor,
    layout_of_model,
    layout_of_names,
    original_tensors,
)
from quantkit.interchange.original_layouts import LAYOUTS
from quantkit.models.building import read_skeleton
from quantkit.models.pipeline_index import read_pipeline_index
from quantkit.models.skeleton import some
from quantkit.models.source import WEIGHTS, SingleFile, StoredBlocks, denoiser_names
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.threads import one_torch_thread
from quantkit.progress import Progress, tracked
from quantkit.storage.copying import copy_file, is_weight, list_files
from quantkit.storage.jsonfile import read_json
from quantkit.storage.system import open_new, write_at

#: Empty tensors of ComfyUI's that say how the model was trained.
_REMARKS = frozenset({"v_pred", "ztsnr"})


@dataclass(frozen=True)
class _Piece:
    """A tensor of diffusers and where its rows are."""

    name: str
    shape: tuple[int, ...]
    tensor: GgufTensor
    #: (first, number) of the tensor's numbers, in the order of the rows
    runs: tuple[tuple[int, int], ...]

    @property
    def dtype(self) -> str:
        return self.tensor.type if self.tensor.type in PLAIN else "F16"


@dataclass(frozen=True)
class GgufModel:
    """A file that fits a model, checked but for its numbers."""

    file: GgufFile
    #: the directory with everything else
    config: Path
    #: the denoiser's sub-folder there; empty when it is a component's directory
    component: str
    pieces: tuple[_Piece, ...]


def open_gguf(source: SingleFile) -> GgufModel:
    """Return a .gguf file and the directory that completes it, which fit each other.

    Raises:
        ModelError: no GGUF file, damaged, of another model than the directory, or one without an
            original layout; no diffusers directory.
    """
    file = read_gguf(source.path)
    component = _component_of(source.config)
    folder = source.config / component
    config = read_json(folder / "config.json")
    if CONFIG_KEY in config:
        raise ModelError(f"{folder}: packed; give the directory of the 16-bit pipeline as config")
    found = layout_of_names(file.tensors)
    if found is None:
        known = ", ".join(layout.architecture for layout in LAYOUTS)
        raise ModelError(
            f"{source.path}: architecture {file.architecture or 'not said'!s:.80}, whose layout is "
            f"not known; wanted one of {known}"
        )
    layout, prefix = found
    if config.get("_class_name") != layout.class_name:
        raise ModelError(
            f"{source.path}: holds {layout.architecture} ({layout.class_name}), but {folder} is a "
            f"{config.get('_class_name')!s:.80}; give the pipeline that the file belongs to",
            fields=("config",),
        )
    try:
        shapes = read_skeleton(folder / "config.json").tensors
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if layout_of_model(layout.class_name, shapes) != layout:
        raise ModelError(
            f"{source.path}: holds {layout.architecture}, but {folder} is of another architecture; "
            "give the pipeline that the file belongs to",
            fields=("config",),
        )
    originals = original_tensors(layout, shapes)
    _refuse_others(file, prefix, originals, folder)
    pieces = [p for o in originals for p in _pieces(file, prefix, o, shapes, folder)]
    return GgufModel(file, source.config, component, tuple(pieces))


def blocks_of(model: GgufModel) -> dict[str, StoredBlocks]:
    """Return the layers whose blocks quantkit packs as they are, by module path."""
    found = {}
    for piece in model.pieces:
        fmt = FORMATS.get(piece.tensor.type.lower())
        windows = prod(piece.shape[2:])
        if fmt is None or windows > 1 or len(piece.shape) < 2 or piece.shape[1] % fmt.block:
            continue
        spans = tuple(
            (
                piece.tensor.start + piece.tensor.bytes_of(first),
                piece.tensor.start + piece.tensor.bytes_of(first + count),
            )
            for first, count in piece.runs
        )
        layer = piece.name.removesuffix(".weight")
        found[layer] = StoredBlocks(model.file.path, fmt.name, spans)
    return found


def unpack(model: GgufModel, folder: Path, *, progress: Progress) -> None:
    """Fill an empty folder with the pipeline, or the component: 16-bit weights from the file.

    What is not the denoiser's is linked, not copied, where the file system can.

    Raises:
        NonFiniteError: NaN or infinity, or a number beyond float16.
        ModelError: the file ends early.
    """
    denoiser = Path(model.component)
    for file in list_files(model.config):
        inside = not model.component or file.parts[0] == model.component
        if is_weight(file) and (inside or file.parent == Path()):
            continue
        _link(model.config / file, folder / file)
    (folder / denoiser).mkdir(exist_ok=True)
    with one_torch_thread():
        _write_weights(model, folder / denoiser / f"{WEIGHTS}.safetensors", progress)


def _component_of(config: Path) -> str:
    """Return the sub-folder of the denoiser; empty for a component's directory."""
    if (config / "model_index.json").is_file():
        names = denoiser_names(read_pipeline_index(config))
        if len(names) != 1:
            raise ModelError(
                f"{config}: {len(names)} denoisers, wanted one; give the pipeline that the file "
                "belongs to",
                fields=("config",),
            )
        return names[0]
    if (config / "config.json").is_file():
        return ""
    raise ModelError(
        f"{config}: not a diffusers directory: found neither model_index.json nor config.json; "
        "give that of the pipeline that the file belongs to",
        fields=("config",),
    )


def _refuse_others(
    file: GgufFile, prefix: str, originals: tuple[OriginalTensor, ...], folder: Path
) -> None:
    """Refuse a file whose tensors are not those of the model."""
    wanted = {prefix + original.name for original in originals}
    found = {name for name in file.tensors if name.startswith(prefix)} - _REMARKS
    for what, names in (("lacks", wanted - found), ("has besides", found - wanted)):
        if names:
            raise ModelError(
                f"{file.path}: {what} {some(names)} for the model of {folder / 'config.json'}; "
                "give the pipeline that the file belongs to, or download it again",
                fields=("config",),
            )


def _pieces(
    file: GgufFile,
    prefix: str,
    original: OriginalTensor,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
) -> Iterator[_Piece]:
    """Yield the parts of one tensor of the file."""
    tensor = file.tensors[prefix + original.name]
    parts = [shapes[name] for name in original.parts]
    whole = parts[0] if len(parts) == 1 else (sum(p[0] for p in parts), *parts[0][1:])
    if tensor.shape != whole:
        raise ModelError(
            f"{file.path}: {tensor.name}: shape {list(tensor.shape)}, the model of "
            f"{folder / 'config.json'} has {list(whole)}; give the pipeline that the file belongs "
            "to",
            fields=("config",),
        )
    length, row = READABLE[tensor.type][0], prod(whole[1:])
    if (len(parts) > 1 or original.swapped) and row % length:
        raise ModelError(
            f"{file.path}: {tensor.name}: rows of {row} cut blocks of {length}; download it again"
        )
    if tensor.values % length:
        raise ModelError(
            f"{file.path}: {tensor.name}: {tensor.values} numbers in blocks of {length}; download "
            "it again"
        )
    first = 0
    for name, shape in zip(original.parts, parts, strict=True):
        count = prod(shape)
        half = shape[0] // 2 * row
        runs = ((first + half, count - half), (first, half)) if original.swapped else (
            (first, count),
        )  # fmt: skip
        yield _Piece(name, shape, tensor, runs)
        first += count


def _write_weights(model: GgufModel, path: Path, progress: Progress) -> None:
    specs = [TensorSpec(piece.name, piece.dtype, piece.shape) for piece in model.pieces]
    header = encode_header(specs, {"format": "pt"})
    slots = place(specs, len(header))
    descriptor = open_new(path)
    try:
        write_at(descriptor, header, 0)
        for piece in tracked(progress, f"unpack {model.file.path.name}", model.pieces):
            _write_piece(model.file, piece, descriptor, slots[piece.name])
    finally:
        os.close(descriptor)


def _write_piece(file: GgufFile, piece: _Piece, descriptor: int, slot: Slot) -> None:
    position = slot.start
    for first, count in piece.runs:
        for chunk in dequantized(file, piece.tensor, count, first):
            data = _in_16_bit(file, piece, chunk).contiguous().view(torch.uint8).numpy().data
            write_at(descriptor, data, position)
            position += len(data)
    assert position == slot.stop, piece.name


def _in_16_bit(file: GgufFile, piece: _Piece, values: Tensor) -> Tensor:
    narrow = values.to(PLAIN[piece.dtype])
    if narrow.dtype is not values.dtype and not all_finite(narrow):
        raise NonFiniteError(
            f"{file.path}: {piece.tensor.name}: a number beyond float16; take another file"
        )
    return narrow


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        # Another file system, or one without links.
        copy_file(source, target)
