"""Writing a denoiser as a .gguf file in its original layout, for diffusers and ComfyUI-GGUF."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit._version import __version__
from quantkit.errors import CheckpointError, ModelError, NonFiniteError, OutputError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.exported import Export
from quantkit.interchange.gguf_file import (
    READABLE,
    all_finite,
    read_gguf,
    require_gguf,
    stored_bytes,
)
from quantkit.interchange.gguf_header import SHAPE_KEY
from quantkit.interchange.joining import join
from quantkit.interchange.layout_names import OriginalTensor, layout_of_model, original_tensors
from quantkit.numerics.threads import one_torch_thread
from quantkit.progress import Progress, tracked
from quantkit.storage.files import staged_file

#: Values in a row of a tensor that ComfyUI-GGUF gives its true shape back.
_COMFY_ROW = 256
_F16_MAX = torch.finfo(torch.float16).max
#: Values that are quantized at a time: 4 MiB in float32.
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class _Planned:
    """One tensor of the file."""

    original: OriginalTensor
    #: prefix included
    name: str
    #: GGML's name of it
    type: str
    #: true shape
    shape: tuple[int, ...]
    #: as the file says it
    stored: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        length, size = READABLE[self.type]
        return prod(self.shape) // length * size


@dataclass(frozen=True)
class GgufPlan:
    """Everything about the file but its data."""

    denoiser: Denoiser
    architecture: str
    #: what weights become that are not in blocks yet: Q8_0 or Q4_0
    type: str
    tensors: tuple[_Planned, ...]

    def summary(self, output: Path, errors: Mapping[str, float] | None = None) -> Export:
        """Return what the file holds."""
        copied = (t.name for t in self.tensors if _is_copied(self.denoiser, t))
        types = Counter(t.type for t in self.tensors)
        nbytes = sum(t.nbytes for t in self.tensors)
        return Export(output, self.architecture, dict(types), nbytes, tuple(copied), errors or {})

    def write(self, output: Path, *, force: bool, progress: Progress) -> Export:
        """Write the file: all of it, or nothing; see ``write_gguf``."""
        return write_gguf(self, output, force=force, progress=progress)


def plan_gguf(
    denoiser: Denoiser, kind: str, *, convolutions: bool, requantize: bool = False
) -> GgufPlan:
    """Decide what each tensor becomes.

    Args:
        denoiser: 16-bit, or packed in blocks.
        kind: Q8_0 or Q4_0, of weights that are not in blocks yet.
        convolutions: quantize them, too, in rows of 256, which ComfyUI-GGUF alone reads.
        requantize: round weights a second time that are packed otherwise than in blocks.

    Raises:
        ModelError: of no known layout, or joined weights that are packed in different formats.
        CheckpointError: a layer that is packed otherwise than in blocks.
    """
    _refuse_codes(denoiser, requantize=requantize)
    layout = layout_of_model(denoiser.class_name, denoiser.shapes)
    tensors = []
    for original in original_tensors(layout, denoiser.shapes):
        shapes = [denoiser.shapes[part] for part in original.parts]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
        planned = _Planned(original, layout.prefix + original.name, "F16", shape, shape)
        tensors.append(_typed(planned, denoiser, kind, convolutions=convolutions))
    # By name: the same model gives the same bytes, however its files are ordered.
    tensors.sort(key=lambda planned: planned.name)
    return GgufPlan(denoiser, layout.architecture, kind, tuple(tensors))


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


def _refuse_codes(denoiser: Denoiser, *, requantize: bool) -> None:
    for name, scheme in denoiser.schemes.items():
        layer = name.removesuffix(".weight")
        if scheme.shift:
            raise CheckpointError(
                f"{denoiser.path}: {layer}: a shifted input, which GGUF does not hold; export the "
                "16-bit model"
            )
        if not scheme.weight.block and not requantize:
            raise CheckpointError(
                f"{denoiser.path}: {layer}: packed in {scheme.weight.name}, which would be "
                "rounded a second time; export the 16-bit model, pack it with recipe gguf, or set "
                "requantize",
                fields=("requantize",),
            )


def _typed(planned: _Planned, denoiser: Denoiser, kind: str, *, convolutions: bool) -> _Planned:
    formats = {denoiser.format(part) for part in planned.original.parts} - {None}
    if len(formats) > 1:
        parts = ", ".join(planned.original.parts)
        raise ModelError(
            f"{denoiser.path}: {parts}: packed in different formats, which the original layout "
            "joins; pack them alike"
        )
    wanted = next((fmt.name.upper() for fmt in formats if fmt is not None), kind)
    shape, length = planned.shape, READABLE[wanted][0]
    if len(shape) == 1:
        return replace(planned, type="F32")
    if not planned.name.endswith(".weight"):
        return planned
    if len(shape) == 2 and shape[1] % length == 0:
        return replace(planned, type=wanted)
    if convolutions and len(shape) == 4 and prod(shape) % _COMFY_ROW == 0:
        return replace(planned, type=wanted, stored=(prod(shape) // _COMFY_ROW, _COMFY_ROW))
    return planned


def _is_copied(denoiser: Denoiser, planned: _Planned) -> bool:
    """Tell whether all of a tensor is in the file's blocks already."""
    formats = {denoiser.format(part) for part in planned.original.parts}
    return {fmt and fmt.name.upper() for fmt in formats} == {planned.type}


def _write(
    plan: GgufPlan, path: Path, progress: Progress
) -> tuple[dict[str, str], dict[str, float]]:
    """Return the SHA-256 of each tensor's bytes, and the errors of what was quantized."""
    gguf = require_gguf()
    writer = gguf.GGUFWriter(path, plan.architecture)
    try:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{plan.type}"])
        writer.add_string("quantkit.version", __version__)
        digests: dict[str, str] = {}
        errors: dict[str, float] = {}
        _declare(plan, writer)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for planned in tracked(progress, "export", plan.tensors):
            data, error = _data(plan.denoiser, planned)
            if error is not None:
                errors[planned.name] = error
            digests[planned.name] = sha256(data.numpy().data).hexdigest()
            writer.write_tensor_data(data.numpy())
    finally:
        writer.close()
    return digests, errors


def _declare(plan: GgufPlan, writer: Any) -> None:
    """Say what tensors follow."""
    gguf = require_gguf()
    for planned in plan.tensors:
        kind = gguf.GGMLQuantizationType[planned.type]
        dtype = np.dtype(np.float32)  # not read beside a type
        writer.add_tensor_info(planned.name, planned.stored, dtype, planned.nbytes, kind)
        if planned.stored != planned.shape:
            writer.add_array(SHAPE_KEY + planned.name, list(planned.shape))


def _data(denoiser: Denoiser, planned: _Planned) -> tuple[Tensor, float | None]:
    """Return a tensor's data, and the error of what was quantized for it."""
    original = planned.original
    if planned.type == "F32":
        return join(original, [denoiser.read(name).float() for name in original.parts]), None
    if planned.type == "F16":
        tensor = join(original, [denoiser.read(name) for name in original.parts]).half()
        if not all_finite(tensor):
            raise NonFiniteError(f"{denoiser.path}: {original.parts[0]}: beyond float16, at most "
                                 f"{_F16_MAX:g}")  # fmt: skip
        return tensor, None
    encoded = [_encoded(denoiser, name, planned) for name in original.parts]
    errors = [error for _, error in encoded if error is not None]
    blocks = join(original, [rows for rows, _ in encoded])
    return blocks.reshape(planned.stored[0], -1), max(errors, default=None)


def _encoded(denoiser: Denoiser, name: str, planned: _Planned) -> tuple[Tensor, float | None]:
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
