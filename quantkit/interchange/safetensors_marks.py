"""Recognising quantized weights of a .safetensors file by other programs' markers.

They are looked for in the order of ``MARKINGS``.

A file with codes but no known marker is refused: codes read as weights would give no error.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.errors import ModelError
from quantkit.interchange.code_formats import FLOAT8, FORMATS, UNMARKED, CodeFormat
from quantkit.storage.jsonfile import parse_json, short
from quantkit.storage.tensorfile import Header, TensorInfo

#: Bytes of such a JSON; real ones have some fifty.
_MARKER_BYTES = 1 << 16
_RETRY = "download it again"
_OTHER_FILE = "take another file of the model"
#: Tensors of other programs' layers whose codes are not read.
_OTHER_PROGRAMS = {
    r"\.quant_map$|\.quant_state\.|\.absmax$": "bitsandbytes",
    r"\.qweight$": "GPTQ, AWQ or Nunchaku",
    r"\.weight_scale_inv$": "blocks of 128 x 128",
    r"\.weight_scale_2$": "nvfp4",
    r"\.weight_packed$": "compressed-tensors",
    r"\._weight_qdata$": "torchao",
}


@dataclass(frozen=True)
class Mark:
    """A layer with codes."""

    format: CodeFormat
    #: names of its other tensors, by what the format calls them
    parts: Mapping[str, str]
    #: the marker; empty where there is none
    told: Mapping[str, Any] = field(default_factory=dict)
    #: tensors that belong to it and say nothing about the weight
    aside: tuple[str, ...] = ()

    def shape_of(self, weight: TensorInfo) -> tuple[int, ...]:
        """Return the shape that a weight has in the model."""
        *rows, columns = weight.shape
        return (*rows, columns * self.format.packed)


@dataclass(frozen=True)
class Marking:
    """The layers of a file that a program marked."""

    #: in words
    format: str
    #: the whole of their names before ``.weight`` -> their codes and scales
    layers: Mapping[str, Mark]
    #: tensors of the file alone
    aside: tuple[str, ...] = ()


def find_marking(header: Header, read: Callable[[TensorInfo], bytes]) -> Marking:
    """Return the marked layers of a file; none in one of plain numbers.

    Args:
        header: of the file.
        read: returns the data of a small tensor.

    Raises:
        ModelError: a marker, or a format, that is not known; a layer without its weight or scale.
    """
    found = (marking for find in MARKINGS if (marking := find(header, read)))
    marking = next(found, Marking(_plain_format(header), {}))
    _refuse_other_programs(header, marking)
    for name, mark in marking.layers.items():
        _check(header, name, mark)
    return marking


def _comfyui(header: Header, read: Callable[[TensorInfo], bytes]) -> Marking | None:
    """``L.comfy_quant``, a JSON in bytes, or all of them in the header's metadata."""
    told: dict[str, object] = {}
    marks = [name for name in header.tensors if name.endswith(".comfy_quant")]
    for name in marks:
        if header.tensors[name].nbytes > _MARKER_BYTES:
            raise ModelError(f"{header.path}: {name}: too large for a marker; {_RETRY}")
        told[name.removesuffix(".comfy_quant")] = _json(header, name, read(header.tensors[name]))
    text = header.metadata.get("_quantization_metadata")
    if text is not None:
        table = _json(header, "_quantization_metadata", text.encode())
        layers = table.get("layers") if isinstance(table, dict) else None
        if not isinstance(layers, dict):
            raise ModelError(f"{header.path}: _quantization_metadata without layers; {_RETRY}")
        told = {**layers, **told}
    if not told:
        return None
    layers = {name: _mark(header, name, entry) for name, entry in told.items()}
    _refuse_unmarked(header, layers)
    return Marking(_word(layers), layers)


def _mark(header: Header, layer: str, entry: object) -> Mark:
    word, told = _format(header, layer, entry)
    found = FORMATS[word]
    parts = {
        part: f"{layer}.{part}"
        for part, row in found.parts.items()
        if not row.optional or f"{layer}.{part}" in header.tensors
    }
    return Mark(found, parts, told, (f"{layer}.comfy_quant", f"{layer}.input_scale"))


def _word(layers: Mapping[str, Mark]) -> str:
    """Return what a file is called whose layers may have several formats."""
    words = {mark.told["format"] for mark in layers.values()}
    if words <= {"float8_e4m3fn", "float8_e5m2", "int8_tensorwise"}:
        return "ComfyUI's int8" if words == {"int8_tensorwise"} else "ComfyUI's scaled FP8"
    return f"ComfyUI's {', '.join(sorted(words))}"


def _legacy(header: Header, read: Callable[[TensorInfo], bytes]) -> Marking | None:
    """One empty tensor ``scaled_fp8``, and ``L.scale_weight``: ComfyUI's former way."""
    del read
    marks = [name for name in header.tensors if re.search(r"(^|\.)scaled_fp8$", name)]
    if not marks:
        return None
    layers = {
        name: Mark(UNMARKED, {"weight_scale": scale}, aside=(f"{name}.scale_input",))
        for scale in header.tensors
        if scale.endswith(".scale_weight")
        and f"{(name := scale.removesuffix('.scale_weight'))}.weight" in header.tensors
    }
    return Marking("ComfyUI's former scaled FP8", layers, tuple(marks))


def _fp8r(header: Header, read: Callable[[TensorInfo], bytes]) -> Marking | None:
    """``L.weight_scale`` with codes in FP8, without a marker."""
    del read
    layers = {}
    for scale in header.tensors:
        name = scale.removesuffix(".weight_scale")
        weight = header.tensors.get(f"{name}.weight")
        if name != scale and weight is not None and weight.dtype in FLOAT8:
            layers[name] = Mark(UNMARKED, {"weight_scale": scale}, aside=(f"{name}.input_scale",))
    return Marking("FP8 with scales (fp8r)", layers) if layers else None


#: In the order in which they are looked for.
MARKINGS: tuple[Callable[[Header, Callable[[TensorInfo], bytes]], Marking | None], ...] = (
    _comfyui,
    _legacy,
    _fp8r,
)


def _plain_format(header: Header) -> str:
    dtypes = {info.dtype for info in header.tensors.values()}
    return "plain FP8" if dtypes.intersection(FLOAT8) else "safetensors"


def _json(header: Header, name: str, data: bytes) -> dict[str, object]:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise ModelError(f"{header.path}: {name}: damaged ({short(error)}); {_RETRY}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{header.path}: {name}: expected a JSON object; {_RETRY}")
    return found


def _format(header: Header, layer: str, entry: object) -> tuple[str, Mapping[str, Any]]:
    """Return the format of a layer's marker, and the marker."""
    found = entry.get("format") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(found, str) or found not in FORMATS:
        raise ModelError(
            f"{header.path}: {layer!r:.200}: format {found!s:.80} is not read, expected one of "
            f"{', '.join(FORMATS)}; {_OTHER_FILE}"
        )
    known = FORMATS[found].keys
    for key, value in sorted(entry.items()):
        if key == "format":
            continue
        if key not in known:
            raise ModelError(
                f"{header.path}: {layer!r:.200}: its marker says {key!r:.80}, which may change "
                f"what the codes mean and is not known; {_OTHER_FILE}"
            )
        if value not in known[key] or type(value) is not type(known[key][0]):
            raise ModelError(
                f"{header.path}: {layer!r:.200}: its marker says {key} {value!r:.80}, expected "
                f"one of {', '.join(map(str, known[key]))}; {_OTHER_FILE}"
            )
    return found, entry


def _refuse_unmarked(header: Header, layers: Mapping[str, Mark]) -> None:
    """Refuse scales without a marker, which ComfyUI drops and others do not."""
    for name in header.tensors:
        layer = name.removesuffix(".weight_scale")
        if layer != name and layer not in layers:
            raise ModelError(
                f"{header.path}: {name!r:.200}: a scale without a marker, in a file with markers; "
                f"{_OTHER_FILE}"
            )


def _refuse_other_programs(header: Header, marking: Marking) -> None:
    """Refuse tensors of other programs' layers, but for those of marked layers."""
    known = {name for mark in marking.layers.values() for name in mark.parts.values()}
    for pattern, program in _OTHER_PROGRAMS.items():
        for name in header.tensors:
            if name not in known and re.search(pattern, name):
                raise ModelError(
                    f"{header.path}: {name}: quantized in {program}, which is not read; "
                    "take the file in 16 bit, scaled FP8 or GGUF"
                )


def _check(header: Header, layer: str, mark: Mark) -> None:
    """Refuse a marked layer whose tensors are not what the marker says."""
    names = (f"{layer}.weight", *mark.parts.values())
    if absent := [name for name in names if name not in header.tensors]:
        raise ModelError(f"{header.path}: {absent[0]!r:.200}: missing, though marked; {_RETRY}")
    weight, found = header.tensors[names[0]], mark.format
    block = found.block(mark.told)
    if (
        weight.dtype not in found.dtypes
        or not weight.shape
        or (block > 1 and (len(weight.shape) != 2 or mark.shape_of(weight)[1] % block))
    ):
        whole = f", rows of whole blocks of {block}" if block > 1 else ""
        raise ModelError(
            f"{header.path}: {weight.name!r:.200}: {weight.dtype} {list(weight.shape)!s:.80}, "
            f"expected codes in {' or '.join(found.dtypes)}{whole}; {_OTHER_FILE}"
        )
    for part, name in mark.parts.items():
        expected = found.parts[part].shapes(mark.shape_of(weight), mark.told)
        if header.tensors[name].shape not in expected:
            raise _misshapen(header, header.tensors[name], expected)


def _misshapen(header: Header, part: TensorInfo, expected: set[tuple[int, ...]]) -> ModelError:
    shapes = " or ".join(str(list(shape)) for shape in sorted(expected))
    return ModelError(
        f"{header.path}: {part.name!r:.200}: shape {list(part.shape)!s:.80}, expected {shapes}; "
        f"{_OTHER_FILE}"
    )
