"""Recognising quantized weights of a .safetensors file by other programs' markers.

They are looked for in the order of ``MARKINGS``.

A file with codes but no known marker is refused: codes read as weights would give no error.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantkit.errors import ModelError
from quantkit.storage.jsonfile import parse_json, short
from quantkit.storage.tensorfile import Header, TensorInfo

#: ComfyUI's formats that are read, and the dtype of their codes.
FORMATS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
#: Codes that are numbers even without a scale.
FLOAT8 = ("F8_E4M3", "F8_E5M2")

#: In ComfyUI's JSON; other keys may change what the codes mean.
_KNOWN_KEYS = {"format", "full_precision_matrix_mult"}
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

    #: the header's names of what dtypes the codes may have
    dtypes: tuple[str, ...]
    #: name of the tensor with the scale
    scale: str
    #: other tensors that belong to it and say nothing about the weight
    aside: tuple[str, ...] = ()


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
    for pattern, program in _OTHER_PROGRAMS.items():
        for name in header.tensors:
            if re.search(pattern, name):
                raise ModelError(
                    f"{header.path}: {name}: quantized in {program}, which is not read; "
                    "take the file in 16 bit, scaled FP8 or GGUF"
                )
    for find in MARKINGS:
        if marking := find(header, read):
            for name, mark in marking.layers.items():
                _check(header, name, mark)
            return marking
    return Marking(_plain_format(header), {})


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
    layers = {
        name: Mark(
            (FORMATS[_format(header, name, entry)],),
            f"{name}.weight_scale",
            (f"{name}.comfy_quant", f"{name}.input_scale"),
        )
        for name, entry in told.items()
    }
    integers = all(mark.dtypes == ("I8",) for mark in layers.values())
    _refuse_unmarked(header, layers)
    return Marking("ComfyUI's int8" if integers else "ComfyUI's scaled FP8", layers)


def _legacy(header: Header, read: Callable[[TensorInfo], bytes]) -> Marking | None:
    """One empty tensor ``scaled_fp8``, and ``L.scale_weight``: ComfyUI's former way."""
    del read
    marks = [name for name in header.tensors if re.search(r"(^|\.)scaled_fp8$", name)]
    if not marks:
        return None
    layers = {
        name: Mark(FLOAT8, scale, (f"{name}.scale_input",))
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
            layers[name] = Mark(FLOAT8, scale, (f"{name}.input_scale",))
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


def _format(header: Header, layer: str, entry: object) -> str:
    """Return the format of a layer's marker."""
    found = entry.get("format") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(found, str) or found not in FORMATS:
        raise ModelError(
            f"{header.path}: {layer!r:.200}: format {found!s:.80} is not read, expected one of "
            f"{', '.join(FORMATS)}; {_OTHER_FILE}"
        )
    if unknown := sorted(entry.keys() - _KNOWN_KEYS):
        raise ModelError(
            f"{header.path}: {layer!r:.200}: its marker says {unknown[0]!r:.80}, which may change "
            f"what the codes mean and is not known; {_OTHER_FILE}"
        )
    return found


def _refuse_unmarked(header: Header, layers: Mapping[str, Mark]) -> None:
    """Refuse scales without a marker, which ComfyUI drops and others do not."""
    for name in header.tensors:
        layer = name.removesuffix(".weight_scale")
        if layer != name and layer not in layers:
            raise ModelError(
                f"{header.path}: {name!r:.200}: a scale without a marker, in a file with markers; "
                f"{_OTHER_FILE}"
            )


def _check(header: Header, layer: str, mark: Mark) -> None:
    """Refuse a marked layer whose weight or scale is not what the marker says."""
    weight, scale = header.tensors.get(f"{layer}.weight"), header.tensors.get(mark.scale)
    if weight is None or scale is None:
        absent = mark.scale if weight is not None else f"{layer}.weight"
        raise ModelError(f"{header.path}: {absent!r:.200}: missing, though marked; {_RETRY}")
    if weight.dtype not in mark.dtypes or not weight.shape:
        raise ModelError(
            f"{header.path}: {weight.name!r:.200}: {weight.dtype} {list(weight.shape)!s:.80}, "
            f"expected codes in {' or '.join(mark.dtypes)}; {_OTHER_FILE}"
        )
    rows, ones = weight.shape[0], (1,) * (len(weight.shape) - 1)
    if scale.shape not in {(), (1,), (1, 1), (rows,), (rows, 1), (rows, *ones)}:
        raise ModelError(
            f"{header.path}: {scale.name!r:.200}: shape {list(scale.shape)!s:.80}, expected one "
            f"scale, or one for each of {rows} rows; scales of blocks are not read, {_OTHER_FILE}"
        )
