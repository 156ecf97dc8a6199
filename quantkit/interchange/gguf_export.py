"""Writing a denoiser as a .gguf file in its original layout, for diffusers and ComfyUI-GGUF."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit._version import __version__
from quantkit.errors import NonFiniteError, OutputError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.exported import Export
from quantkit.interchange.gguf_file import (
    PLAIN,
    all_finite,
    read_gguf,
    require_gguf,
    stored_bytes,
)
from quantkit.interchange.gguf_header import SHAPE_KEY
from quantkit.interchange.gguf_plan import PlannedTensor, is_copied, plan_notes, plan_types
from quantkit.interchange.joining import join
from quantkit.numerics.threads import one_torch_thread
from quantkit.progress import Progress, tracked
from quantkit.storage.files import staged_file

#: Tensors begin at multiples of it, of GGML's own.
_ALIGNMENT = 32
#: Values that are quantized at a time: 4 MiB in float32.
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class GgufPlan:
    """Everything about the file but its data."""

    denoiser: Denoiser
    architecture: str
    #: the type of weights that are not in blocks yet: Q8_0 or Q4_0
    type: str
    tensors: tuple[PlannedTensor, ...]

    @property
    def usual(self) -> str:
        """The type of most tensors in blocks."""
        found = Counter(tensor.type for tensor in self.tensors if tensor.in_blocks)
        return max(found, key=lambda kind: (found[kind], kind), default=self.type)

    @property
    def formats(self) -> tuple[Mapping[str, str], ...]:
        """Of the one component, the formats of the weights that are in blocks in the file."""
        blocks = [tensor for tensor in self.tensors if tensor.in_blocks]
        return ({part: t.type.lower() for t in blocks for part in t.original.parts},)

    def summary(self, output: Path, errors: Mapping[str, float] | None = None) -> Export:
        """Return what the file holds."""
        return Export(
            output,
            self.architecture,
            dict(Counter(tensor.type for tensor in self.tensors)),
            sum(tensor.nbytes for tensor in self.tensors),
            tuple(t.name for t in self.tensors if is_copied(self.denoiser, t)),
            errors or {},
            tuple(plan_notes(self.denoiser, self.type, self.tensors)),
        )

    def write(self, output: Path, *, force: bool, progress: Progress) -> Export:
        """Write the file: all of it, or nothing; see ``write_gguf``."""
        return write_gguf(self, output, force=force, progress=progress)


def plan_gguf(
    denoiser: Denoiser, kind: str, *, convolutions: bool, requantize: bool = False
) -> GgufPlan:
    """Plan each tensor's type; tensors that the model or its family keeps are unchanged.

    Args:
        denoiser: 16-bit, or packed in blocks.
        kind: Q8_0 or Q4_0, of weights that are not in blocks yet.
        convolutions: quantize them, too, in rows of 256, which ComfyUI-GGUF alone reads.
        requantize: round weights a second time that are packed otherwise than in blocks.

    Raises:
        ModelError: of no known layout, or joined weights that are packed in different formats.
        CheckpointError: a layer that is packed otherwise than in blocks, or joined with one that is
            not packed.
    """
    architecture, tensors = plan_types(
        denoiser, kind, convolutions=convolutions, requantize=requantize
    )
    return GgufPlan(denoiser, architecture, kind, tensors)


def write_gguf(plan: GgufPlan, output: Path, *, force: bool, progress: Progress) -> Export:
    """Write the file: all of it, or nothing.

    Args:
        plan: from ``plan_gguf``.
        output: the file to make.
        force: replace an existing one once the new one is complete.
        progress: told of tensors done.

    Raises:
        NonFiniteError: NaN or infinity in a tensor.
        OutputError: the file exists, or cannot be written.
    """
    with one_torch_thread(), staged_file(output, force=force) as made:
        digests, errors = _write(plan, made, progress)
        _compare(plan, made, digests, progress)
    return plan.summary(output, errors)


def _write(
    plan: GgufPlan, path: Path, progress: Progress
) -> tuple[dict[str, str], dict[str, float]]:
    """Return the SHA-256 of each tensor's bytes, and the errors of quantized ones."""
    digests: dict[str, str] = {}
    errors: dict[str, float] = {}
    _write_header(plan, path)
    # Not by the package, whose error on a full disk has no number that says so.
    with path.open("ab") as file:
        for planned in tracked(progress, "export", plan.tensors):
            file.write(bytes(-file.tell() % _ALIGNMENT))
            values, error = _data(plan.denoiser, planned)
            data = values.contiguous().reshape(-1).view(torch.uint8).numpy().data
            if error is not None:
                errors[planned.name] = error
            digests[planned.name] = sha256(data).hexdigest()
            file.write(data)
        file.write(bytes(-file.tell() % _ALIGNMENT))
    return digests, errors


def _write_header(plan: GgufPlan, path: Path) -> None:
    gguf = require_gguf()
    writer = gguf.GGUFWriter(path, plan.architecture)
    try:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{plan.usual}"])
        writer.add_string("quantkit.version", __version__)
        _declare(plan, writer)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _declare(plan: GgufPlan, writer: Any) -> None:
    """Declare the tensors that follow."""
    gguf = require_gguf()
    for planned in plan.tensors:
        kind = gguf.GGMLQuantizationType[planned.type]
        dtype = np.dtype(np.float32)  # not read where there is a type
        writer.add_tensor_info(planned.name, planned.stored, dtype, planned.nbytes, kind)
        if planned.stored != planned.shape:
            writer.add_array(SHAPE_KEY + planned.name, list(planned.shape))


def _data(denoiser: Denoiser, planned: PlannedTensor) -> tuple[Tensor, float | None]:
    """Return a tensor's data, and its quantization error."""
    original = planned.original
    if planned.type in PLAIN:
        tensor = join(original, [denoiser.read(name) for name in original.parts])
        plain = tensor.to(PLAIN[planned.type])
        if not all_finite(plain):
            raise NonFiniteError(f"{denoiser.path}: {original.parts[0]}: beyond {plain.dtype}")
        return plain, None
    encoded = [_encoded(denoiser, name, planned) for name in original.parts]
    errors = [error for _, error in encoded if error is not None]
    blocks = join(original, [rows for rows, _ in encoded])
    return blocks.reshape(planned.stored[0], -1), max(errors, default=None)


def _encoded(denoiser: Denoiser, name: str, planned: PlannedTensor) -> tuple[Tensor, float | None]:
    """Return a weight's blocks, a row of them for each of its rows, and its relative error."""
    if denoiser.format(name) is not None:
        return denoiser.blocks(name), None
    gguf = require_gguf()
    kind = gguf.GGMLQuantizationType[planned.type]
    tensor = denoiser.read(name)
    blocks, lost, power = [], 0.0, 0.0
    rows = tensor.reshape(-1, planned.stored[1])
    step = max(1, _CHUNK_VALUES // rows.shape[1])
    for first in range(0, len(rows), step):
        part = rows[first : first + step].float()
        blocks.append(torch.from_numpy(gguf.quantize(part.numpy(), kind)))
        values = torch.from_numpy(gguf.dequantize(blocks[-1].numpy(), kind))
        lost += float((values - part).square().sum(dtype=torch.float64))
        power += float(part.square().sum(dtype=torch.float64))
    return torch.cat(blocks), (lost / power) ** 0.5 if power else 0.0


def _compare(plan: GgufPlan, path: Path, digests: Mapping[str, str], progress: Progress) -> None:
    """Refuse a file that does not read as it was written: a broken disk, or a broken package."""
    file = read_gguf(path)
    for planned in tracked(progress, "read back", plan.tensors):
        found = file.tensors.get(planned.name)
        if found is None or (found.type, found.shape) != (planned.type, planned.shape):
            raise OutputError(f"{path}: {planned.name}: not read back as written; export again")
        data = stored_bytes(file, found.start, planned.nbytes)
        if sha256(data.numpy().data).hexdigest() != digests[planned.name]:
            raise OutputError(f"{path}: {planned.name}: other bytes than written; export again")
