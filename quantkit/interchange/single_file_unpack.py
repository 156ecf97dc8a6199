"""Writing a single file as a diffusers directory: weights in 16 bit, the rest from the config."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.spec import TensorSpec
from quantkit.checkpoint.tensor_layout import Slot, encode_header, place
from quantkit.errors import NonFiniteError
from quantkit.interchange.checkpoint_parts import Part
from quantkit.interchange.gguf_file import PLAIN, all_finite
from quantkit.interchange.pieces import Piece
from quantkit.interchange.single_file_model import SingleFileModel
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.numerics.threads import one_torch_thread
from quantkit.progress import Progress, tracked
from quantkit.storage.copying import copy_file, is_pickle, is_weight, list_files
from quantkit.storage.jsonfile import read_json
from quantkit.storage.system import open_new, write_at

#: What SDNQ says in config.json, once more.
_SDNQ_CONFIG = "quantization_config.json"


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
        take: copies or links a file that holds no weights of these components.
        progress: told of tensors unpacked.

    Raises:
        NonFiniteError: NaN or infinity, or a number beyond float16.
        ModelError: the file ends early.
    """
    replaced = {part.component for part in model.parts}
    for file in list_files(model.config):
        inside = file.parts[0] in replaced or not model.denoiser.component
        if is_pickle(file) or (is_weight(file) and (inside or file.parent == Path())):
            continue
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if not (inside and _told_of_codes(model.config / file, folder / file)):
            take(model.config / file, folder / file)
    with one_torch_thread():
        for part in model.parts:
            (folder / part.component).mkdir(exist_ok=True)
            _write_weights(model.file.path, part, folder / part.component, progress)


def _told_of_codes(source: Path, target: Path) -> bool:
    """Tell whether a file says how weights were quantized; write it without that."""
    if source.name == _SDNQ_CONFIG:
        return True
    config = read_json(source) if source.name == "config.json" else {}
    if CONFIG_KEY not in config:
        return False
    del config[CONFIG_KEY]
    target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return True


def link(source: Path, target: Path) -> None:
    """Make a file that shares the bytes of another, or a copy where they cannot be shared."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        # Another file system, or one without links.
        copy_file(source, target)


def specs_of(part: Part) -> list[TensorSpec]:
    """Return the tensors of a component that are written."""
    return [TensorSpec(piece.name, piece.dtype, piece.shape) for piece in part.pieces]


def _write_weights(source: Path, part: Part, folder: Path, progress: Progress) -> None:
    specs = specs_of(part)
    header = encode_header(specs, {"format": "pt"})
    slots = place(specs, len(header))
    descriptor = open_new(folder / f"{part.stem}.safetensors")
    try:
        write_at(descriptor, header, 0)
        for piece in tracked(progress, f"unpack {part.component or source.name}", part.pieces):
            _write_piece(source, piece, descriptor, slots[piece.name])
    finally:
        os.close(descriptor)


def _write_piece(path: Path, piece: Piece, descriptor: int, slot: Slot) -> None:
    position = slot.start
    for chunk in _read(piece):
        data = _narrowed(path, piece, chunk).contiguous().view(torch.uint8).numpy().data
        write_at(descriptor, data, position)
        position += len(data)
    assert position == slot.stop, piece.name


def _read(piece: Piece) -> Iterator[Tensor]:
    chunks = (chunk for first, count in piece.runs for chunk in piece.tensor.read(first, count))
    if not piece.transposed:
        return chunks
    # Projections of text encoders, of a few MB.
    return iter([torch.cat(list(chunks)).reshape(piece.shape[::-1]).T.flatten()])


def _narrowed(path: Path, piece: Piece, values: Tensor) -> Tensor:
    narrow = values.to(PLAIN[piece.dtype])
    if narrow.dtype is not values.dtype and not all_finite(narrow):
        raise NonFiniteError(
            f"{path}: {piece.tensor.name}: a number beyond {piece.dtype}; take another file"
        )
    return narrow
