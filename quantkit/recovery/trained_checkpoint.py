"""Writing a trained packed model: its directory again, with other codes, scales, biases and norms.

Names, dtypes, shapes and places of tensors stay; digests follow the values.
"""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.filelist import CARD, MADE, write_file_list
from quantkit.checkpoint.metadata import METADATA_KEY
from quantkit.checkpoint.reader import Packed, open_packed
from quantkit.checkpoint.spec import TensorSpec
from quantkit.checkpoint.tensor_layout import encode_header
from quantkit.checkpoint.torch_dtypes import FLOAT_DTYPES, PACKED_DTYPES
from quantkit.checkpoint.validate import Shard
from quantkit.errors import NonFiniteError
from quantkit.packing.card import trained_card
from quantkit.packing.pack_model import KIND
from quantkit.storage.copying import copy_files, list_files
from quantkit.storage.files import staged_directory
from quantkit.storage.inputfile import open_file
from quantkit.storage.places import check_directory, refuse_overlap
from quantkit.storage.tensorfile import TensorInfo, read_bytes

_DTYPES = FLOAT_DTYPES | PACKED_DTYPES


def refuse_output(packed: Packed, output: Path, *, force: bool) -> None:
    """Refuse an output that cannot be, before anything long begins.

    Raises:
        OutputError: it exists without ``force``, or lies in the packed model.
    """
    check_directory(output, kind=KIND, force=force)
    refuse_overlap(output, packed.path)


def write_trained(
    packed: Packed,
    name: str,
    tensors: Mapping[str, Tensor],
    output: Path,
    *,
    force: bool,
) -> None:
    """Write a packed directory again, with other tensors in one of its components.

    Args:
        packed: the directory.
        name: of the component.
        tensors: by their names in the files: codes as they are stored, and float32; those that no
            file has are left out.
        output: the directory to make.
        force: replace an existing output.

    Raises:
        NonFiniteError: a trained number does not fit the dtype of the file.
        OutputError: the output exists without ``force``, or cannot be written.
    """
    refuse_output(packed, output, force=force)
    shards = {
        shard.header.path.relative_to(packed.path): (component.name, shard)
        for component in packed.components
        for shard in component.shards
    }
    trained = {path: shard for path, (owner, shard) in shards.items() if owner == name}
    files = [f for f in list_files(packed.path) if f.name not in MADE and f not in trained]
    with staged_directory(output, kind=KIND, force=force) as stage:
        copy_files(packed.path, stage, files)
        for path, shard in trained.items():
            _write_shard(shard, stage / path, tensors)
        write_file_list(stage, {}, list(shards))
        if (packed.path / CARD).is_file():
            text = (packed.path / CARD).read_text(encoding="utf-8")
            (stage / CARD).write_text(trained_card(text), encoding="utf-8")
        open_packed(stage)


def _write_shard(shard: Shard, target: Path, tensors: Mapping[str, Tensor]) -> None:
    infos, metadata = shard.header.tensors, shard.header.metadata
    specs = [TensorSpec(info.name, info.dtype, info.shape) for info in infos.values()]
    digests = {}
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_file(shard.header.path) as source, target.open("wb") as file:
        # Digests have one length, so the header keeps its own.
        file.write(encode_header(specs, metadata))
        for info in infos.values():
            old = read_bytes(info, source.fileno())
            data = _stored(info, tensors[info.name]) if info.name in tensors else old
            assert len(data) == len(old), info.name
            digests[info.name] = sha256(data).hexdigest()
            file.write(data)
        text = replace(shard.metadata, tensors=digests).to_text()
        file.seek(0)
        file.write(encode_header(specs, {**metadata, METADATA_KEY: text}))


def _stored(info: TensorInfo, value: Tensor) -> bytes:
    """Return the bytes of a trained tensor in the dtype of its file."""
    dtype = _DTYPES[info.dtype]
    stored = value.to(dtype) if dtype.itemsize > 1 else value
    if dtype.itemsize > 1 and not bool(stored.isfinite().all()):
        raise NonFiniteError(
            f"recovery: {info.name} does not fit {dtype} (up to {float(value.abs().max()):g}); "
            "take a lower rate",
            fields=("rate",),
        )
    return bytes(stored.contiguous().flatten().view(torch.uint8).numpy())
