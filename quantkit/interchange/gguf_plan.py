"""The plan of a .gguf file: the type of each tensor, decided before anything is written."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from quantkit.errors import CheckpointError, ModelError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.gguf_file import READABLE
from quantkit.interchange.layout_names import OriginalTensor, layout_of_model, original_tensors

#: Values in a row of a tensor that ComfyUI-GGUF gives its true shape back.
_COMFY_ROW = 256
#: The type of packed weights that cannot stay in blocks.
_DEQUANTIZED = "F16"


@dataclass(frozen=True)
class PlannedTensor:
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
        """Size of the data."""
        length, size = READABLE[self.type]
        return prod(self.shape) // length * size

    @property
    def in_blocks(self) -> bool:
        """True where numbers have scales."""
        return READABLE[self.type][0] > 1

    @property
    def is_matrix(self) -> bool:
        """True of what may be a layer's weight."""
        return len(self.shape) > 1 and self.name.endswith(".weight")


@dataclass(frozen=True)
class _Choice:
    """The options that the user chose."""

    #: Q8_0 or Q4_0, of weights that are not in blocks yet
    kind: str
    convolutions: bool
    requantize: bool


def plan_types(
    denoiser: Denoiser, kind: str, *, convolutions: bool, requantize: bool
) -> tuple[str, tuple[PlannedTensor, ...]]:
    """Plan each tensor's type; see ``plan_gguf``.

    Returns:
        the architecture's name; the tensors by name: the same model gives the same bytes, however
        its files are ordered.
    """
    _refuse_codes(denoiser, requantize=requantize)
    layout = layout_of_model(denoiser.class_name, denoiser.shapes)
    if not layout.gguf:
        raise ModelError(
            f"{denoiser.path}: {denoiser.class_name}: no program reads it from GGUF files; export "
            "it to comfyui-w4a8, as small as Q4_0, or to single-file, comfyui or comfyui-int8"
        )
    choice = _Choice(kind, convolutions, requantize)
    tensors = []
    for original in original_tensors(layout, denoiser.shapes):
        shapes = [denoiser.shapes[part] for part in original.parts]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
        planned = PlannedTensor(original, layout.prefix + original.name, "F32", shape, shape)
        tensors.append(_typed(planned, denoiser, choice))
    return layout.architecture, tuple(sorted(tensors, key=lambda planned: planned.name))


def plan_notes(denoiser: Denoiser, kind: str, tensors: tuple[PlannedTensor, ...]) -> Iterator[str]:
    """Yield a line for each thing in the file that may surprise the user."""
    kept = sum(
        tensor.is_matrix and not tensor.in_blocks and _kept_parts(denoiser, tensor) != []
        for tensor in tensors
    )
    if kept:
        whose = "the packed model" if denoiser.is_packed else "the model's family"
        yield f"{kept} weights stay as they are, because {whose} keeps them"
    others = [tensor for tensor in tensors if tensor.in_blocks and tensor.type != kind]
    if others:
        yield f"{len(others)} weights are {others[0].type}, as they were packed, not {kind}"


def is_copied(denoiser: Denoiser, planned: PlannedTensor) -> bool:
    """Tell whether all of a tensor is in the file's blocks already."""
    formats = {denoiser.format(part) for part in planned.original.parts}
    return {fmt and fmt.name.upper() for fmt in formats} == {planned.type}


def _refuse_codes(denoiser: Denoiser, *, requantize: bool) -> None:
    for name, scheme in denoiser.schemes.items():
        layer = name.removesuffix(".weight")
        if not scheme.weight.block and not requantize:
            raise CheckpointError(
                f"{denoiser.path}: {layer}: packed in {scheme.weight.name}, which would be "
                "rounded a second time; export the 16-bit model, pack it with recipe gguf, or set "
                "requantize",
                fields=("requantize",),
            )


def _typed(planned: PlannedTensor, denoiser: Denoiser, choice: _Choice) -> PlannedTensor:
    kept = _kept_parts(denoiser, planned)
    if kept or not planned.is_matrix:
        _refuse_partly_packed(denoiser, planned, kept, choice)
        return replace(planned, type=_plain_type(denoiser, planned))
    expected = _block_type(denoiser, planned, choice.kind)
    shape, length = planned.shape, READABLE[expected][0]
    if len(shape) == 2 and shape[1] % length == 0:
        return replace(planned, type=expected)
    if choice.convolutions and len(shape) == 4 and prod(shape) % _COMFY_ROW == 0:
        return replace(planned, type=expected, stored=(prod(shape) // _COMFY_ROW, _COMFY_ROW))
    return replace(planned, type=_plain_type(denoiser, planned))


def _kept_parts(denoiser: Denoiser, planned: PlannedTensor) -> list[str]:
    """Return the parts of a weight that stay as they are."""
    if not planned.is_matrix:
        return []
    return [part for part in planned.original.parts if denoiser.keeps(part)]


def _refuse_partly_packed(
    denoiser: Denoiser, planned: PlannedTensor, kept: list[str], choice: _Choice
) -> None:
    packed = [part for part in planned.original.parts if part in denoiser.schemes]
    if packed and kept and not choice.requantize:
        raise CheckpointError(
            f"{denoiser.path}: {packed[0].removesuffix('.weight')}: joined with {kept[0]}, which "
            "is not packed; pack them in one format, or set requantize, which dequantizes them",
            fields=("requantize",),
        )


def _plain_type(denoiser: Denoiser, planned: PlannedTensor) -> str:
    """Return the type that holds unpacked numbers exactly; F32 for vectors."""
    parts = planned.original.parts
    dtypes = {denoiser.dtypes.get(part, _DEQUANTIZED) for part in parts}
    if len(planned.shape) < 2 or len(dtypes) > 1:
        return "F32"
    (dtype,) = dtypes
    # diffusers and ComfyUI-GGUF take BF16 for blocks, which only Linear layers may have.
    linear = planned.is_matrix and len(planned.shape) == 2
    return "F32" if dtype == "BF16" and not linear else dtype


def _block_type(denoiser: Denoiser, planned: PlannedTensor, kind: str) -> str:
    """Return the block type that a weight has or gets."""
    formats = {denoiser.format(part) for part in planned.original.parts} - {None}
    if len(formats) > 1:
        parts = ", ".join(planned.original.parts)
        raise ModelError(
            f"{denoiser.path}: {parts}: packed in different formats, which the original layout "
            "joins; pack them in one format"
        )
    return next((fmt.name.upper() for fmt in formats if fmt is not None), kind)
