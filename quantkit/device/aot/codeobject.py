"""Resources of a compiled kernel, read from its object: registers, LDS, spills, arguments."""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from quantkit.device.aot.elf import (
    Section,
    Value,
    is_note,
    read_notes,
    read_sections,
    unpack_message,
)

_T = TypeVar("_T")

_AMDGPU_METADATA = ("AMDGPU", 32)
# Attributes of .nv.info entries; payloads of format 4 start with a symbol index.
_NV_SIZED = 4
_NV_FRAME_SIZE, _NV_REGISTERS = 0x11, 0x2F
#: Low bits of the sm_89 instructions that multiply matrices, dense and sparse (.SP) alike: FP8,
#: agreed with nvdisasm of CUDA 13, and int8.
_MATRIX = {0x27A: "QMMA", 0x237: "IMMA", 0x23C: "HMMA"}


@dataclass(frozen=True)
class ObjectArgument:
    """One argument as the object declares it."""

    offset: int
    size: int
    #: global_buffer, by_value, hidden_...
    kind: str


@dataclass(frozen=True)
class Resources:
    """One kernel of an object."""

    symbol: str
    #: vector registers per lane
    vgprs: int
    #: scalar registers; 0 where the target has none
    sgprs: int
    #: registers that did not fit
    spills: int
    #: private memory per lane, bytes
    scratch: int
    #: static LDS per block, bytes
    lds: int
    #: None where the object does not say
    args: tuple[ObjectArgument, ...] | None


def read_amd_kernels(content: bytes) -> tuple[Resources, ...]:
    """Return the kernels that an AMD code object's metadata note describes.

    Raises:
        ValueError: there is no such note, or it is damaged.

    Source: LLVM's AMDGPU usage guide, code object V3 and above metadata.
    """
    for section in read_sections(content):
        note = read_notes(section).get(_AMDGPU_METADATA) if is_note(section) else None
        if note is None:
            continue
        metadata = unpack_message(note)
        kernels = metadata.get("amdhsa.kernels") if isinstance(metadata, dict) else None
        if isinstance(kernels, list):
            return tuple(_amd_resources(kernel) for kernel in kernels)
    raise ValueError("no AMDGPU metadata note")


def read_nvidia_kernels(content: bytes) -> tuple[Resources, ...]:
    """Return the kernels of a cubin.

    Raises:
        ValueError: not an ELF file.
    """
    sections = {s.name: s for s in read_sections(content)}
    names = [n.removeprefix(".text.") for n in sections if n.startswith(".text.")]
    return tuple(_nvidia_resources(name, sections) for name in names)


def count_matrix_instructions(content: bytes, symbol: str) -> Counter[str]:
    """Count the matrix instructions of a kernel in an sm_89 cubin (16 bytes an instruction)."""
    text = next(s.content for s in read_sections(content) if s.name == f".text.{symbol}")
    words = struct.iter_unpack("<IIII", text[: len(text) // 16 * 16])
    return Counter(_MATRIX[first & 0xFFF] for first, *_ in words if first & 0xFFF in _MATRIX)


def _amd_resources(kernel: Value) -> Resources:
    return Resources(
        symbol=_entry(kernel, ".name", str),
        vgprs=_entry(kernel, ".vgpr_count", int),
        sgprs=_entry(kernel, ".sgpr_count", int),
        spills=_entry(kernel, ".vgpr_spill_count", int) + _entry(kernel, ".sgpr_spill_count", int),
        scratch=_entry(kernel, ".private_segment_fixed_size", int),
        lds=_entry(kernel, ".group_segment_fixed_size", int),
        args=tuple(_amd_argument(argument) for argument in _entry(kernel, ".args", list)),
    )


def _amd_argument(argument: Value) -> ObjectArgument:
    return ObjectArgument(
        _entry(argument, ".offset", int),
        _entry(argument, ".size", int),
        _entry(argument, ".value_kind", str),
    )


def _entry(table: Value, key: str, expected: type[_T]) -> _T:
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, expected):
        raise ValueError(f"{key} is {value!r}, expected {expected.__name__}")  # noqa: TRY004  damage
    return value


def _nvidia_resources(name: str, sections: dict[str, Section]) -> Resources:
    shared = sections.get(f".nv.shared.{name}")
    own, common = sections[f".nv.info.{name}"].content, sections[".nv.info"].content
    frame = max((value for _, value in _sized(_NV_FRAME_SIZE, own, common)), default=0)
    index = sections[f".text.{name}"].info & 0xFFFFFF
    return Resources(
        symbol=name,
        vgprs=dict(_sized(_NV_REGISTERS, common))[index],
        sgprs=0,
        # The sources keep no array that is indexed at run time, so a frame is spilled registers.
        spills=frame // 4,
        scratch=frame,
        lds=shared.size if shared else 0,
        args=None,
    )


def _sized(attribute: int, *infos: bytes) -> Iterator[tuple[int, int]]:
    """Yield (symbol, value) of every entry with ``attribute``."""
    for info in infos:
        at = 0
        while at + 4 <= len(info):
            kind, found, size = struct.unpack_from("<BBH", info, at)
            at += 4
            if kind != _NV_SIZED:
                continue
            if found == attribute:
                yield struct.unpack_from("<II", info, at)
            at += size
