"""Writing a single file as a diffusers directory: its denoiser in 16 bit, the rest from config."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.layout import Slot, encode_header, place
from quantkit.checkpoint.spec import TensorSpec
from quantkit.errors import NonFiniteError
from quantkit.interchange.gguf_file import PLAIN, all_finite
from quantkit.interchange.single_file_model import Piece, SingleFileModel
from quantkit.models.source import WEIGHTS
from quantkit.numerics.threads import one_torch_thread
from quantkit.progress import Progress, tracked
from quantkit.storage.copying import copy_file, is_weight, list_files
from quantkit.storage.system import open_new, write_at


def unpack(
    model: SingleFileModel,
    folder: Path,
    *,
    take: Callable[[Path, Path], None] = copy_file,
    progress: Progress,
) -> None:
    """Fill an empty folder with the pipeline, or the component: 16-bit weights from the file.

    Args:
        model: the file and its config.
        folder: to fill.
        take: copies or links a file that is not the denoiser's weights.
        progress: told of tensors unpacked.

    Raises:
        NonFiniteError: NaN or infinity, or a number beyond float16.
        ModelError: the file ends early.
    """
    for file in list_files(model.config):
        inside = not model.component or file.parts[0] == model.component
        if is_weight(file) and (inside or file.parent == Path()):
            continue
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        take(model.config / file, folder / file)
    denoiser = folder / model.component
    denoiser.mkdir(exist_ok=True)
    with one_torch_thread():
        _write_weights(model, denoiser / f"{WEIGHTS}.safetensors", progress)


def link(source: Path, target: Path) -> None:
    """Make a file that shares the bytes of another, or a copy where they cannot be shared."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        # Another file system, or one without links.
        copy_file(source, target)


def specs_of(model: SingleFileModel) -> list[TensorSpec]:
    """Return the tensors that are written."""
    return [TensorSpec(piece.name, piece.dtype, piece.shape) for piece in model.pieces]


def _write_weights(model: SingleFileModel, path: Path, progress: Progress) -> None:
    specs = specs_of(model)
    header = encode_header(specs, {"format": "pt"})
    slots = place(specs, len(header))
    descriptor = open_new(path)
    try:
        write_at(descriptor, header, 0)
        for piece in tracked(progress, f"unpack {model.file.path.name}", model.pieces):
            _write_piece(model.file.path, piece, descriptor, slots[piece.name])
    finally:
        os.close(descriptor)


def _write_piece(path: Path, piece: Piece, descriptor: int, slot: Slot) -> None:
    position = slot.start
    for first, count in piece.runs:
        for chunk in piece.tensor.read(first, count):
            data = _narrowed(path, piece, chunk).contiguous().view(torch.uint8).numpy().data
            write_at(descriptor, data, position)
            position += len(data)
    assert position == slot.stop, piece.name


def _narrowed(path: Path, piece: Piece, values: Tensor) -> Tensor:
    narrow = values.to(PLAIN[piece.dtype])
    if narrow.dtype is not values.dtype and not all_finite(narrow):
        raise NonFiniteError(
            f"{path}: {piece.tensor.name}: a number beyond {piece.dtype}; take another file"
        )
    return narrow
