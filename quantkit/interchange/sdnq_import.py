"""Directories that SDNQ wrote, as models whose codes are dequantized: tensor by tensor.

A tensor's own data type and shape say how its codes lie; the config says what they do not: that
nothing else was done to the numbers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.errors import CheckpointError, ModelError, NonFiniteError
from quantkit.interchange.checkpoint_parts import OtherParts, Part
from quantkit.interchange.gguf_file import PLAIN, all_finite
from quantkit.interchange.pieces import ModelShapes, Naming, own_names, pieces_of
from quantkit.interchange.safetensors_import import SafetensorsWeight, read_numbers
from quantkit.interchange.sdnq_codes import PARTS, dequantized, problem_of
from quantkit.interchange.single_file_model import SingleFileModel
from quantkit.interchange.stored_file import StoredFile, StoredTensor
from quantkit.models.building import read_skeleton
from quantkit.models.pipeline_index import denoiser_names, read_models
from quantkit.models.quantizers import CONFIG_KEY, find_quantizer, name_quantizer
from quantkit.models.skeleton import some
from quantkit.models.source import ENCODER_WEIGHTS, WEIGHTS, architecture, find_weights
from quantkit.storage.jsonfile import read_json
from quantkit.storage.tensorfile import TensorInfo, read_header

_CURE = "start from the 16-bit model that it came from, or let SDNQ dequantize it"
#: Formats whose codes are read. "minimum_6bit" is one of SDNQ's integers, too.
_READ = re.compile(r"fp8|float8_e4m3fn|float8_e5m2|(minimum[-_]?)?(u?int)?[2-8]([-_]?bits?)?")
#: Keys that change what codes mean: all but the values named here are refused.
_PLAIN = {
    "scale_dtype": (None, "none"),
    "zero_point_dtype": (None, "none"),
    "use_codebook": (None, False),
    "use_codebook_scale": (None, False),
    "use_hadamard": (None, False),
    "is_training": (None, False),
}
#: Keys that do not, or that the tensors tell, too. Source: sdnq 0.2.8.
_KNOWN = frozenset({
    "add_skip_keys", "codebook_steps", "dequantize_fp32", "dynamic_loss_threshold", "group_size",
    "hadamard_group_size", "is_integer", "is_unsigned", "minimum_allowed_channel_size",
    "minimum_allowed_numel", "modules_dtype_dict", "modules_quant_config",
    "modules_to_not_convert", "modules_to_not_use_matmul", "non_blocking", "quant_conv",
    "quant_embedding", "quant_method", "quantization_device", "quantized_matmul_dtype",
    "return_device", "sdnq_version", "svd_rank", "svd_steps", "use_dynamic_quantization",
    "use_grad_ckpt", "use_quantized_matmul", "use_quantized_matmul_conv", "use_static_quantization",
    "use_stochastic_rounding", "use_svd", "weights_dtype",
})  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """A tensor and its file."""

    path: Path
    info: TensorInfo

    def read(self) -> Tensor:
        numbers = read_numbers(self.path, self.info, 0, prod(self.info.shape))
        return numbers.reshape(self.info.shape)


@dataclass(frozen=True)
class SdnqWeight:
    """A weight of a layer that SDNQ quantized, which is read whole."""

    name: str
    shape: tuple[int, ...]
    #: "weight" and of ``PARTS``
    places: Mapping[str, _Place]
    dtype: None = None
    quantized: bool = True

    @property
    def block(self) -> int:
        """The number of its values: they are read together."""
        return prod(self.shape)

    @property
    def problem(self) -> str:
        """The reason that it cannot be read; empty when it can."""
        infos = {part: place.info for part, place in self.places.items()}
        problem = problem_of(self.shape, infos)
        return f"{problem}; {_CURE}" if problem else ""

    def read(self, first: int, count: int) -> Iterator[Tensor]:
        """Yield its numbers, flat, float32.

        Raises:
            ModelError: the file has ended.
            NonFiniteError: NaN or infinity.
        """
        assert (first, count) == (0, self.block)
        tensors = {part: place.read() for part, place in self.places.items()}
        values = dequantized(self.shape, tensors)
        if not all_finite(values):
            raise NonFiniteError(
                f"{self.places['weight'].path}: {self.name}: NaN or infinity; take the model from "
                "elsewhere"
            )
        yield values.flatten()


def open_sdnq(folder: Path) -> SingleFileModel:
    """Return a directory that SDNQ wrote, checked but for its numbers.

    Args:
        folder: of a pipeline, or of one component.

    Raises:
        ModelError: no such directory, or one in which SDNQ quantized nothing; a format that is not
            read; tensors missing, left over or of another shape.
    """
    parts = tuple(_part(folder, *each) for each in _quantized(folder))
    if not parts:
        raise ModelError(
            f"{folder}: no component that SDNQ quantized, expected one or a single file; other "
            "commands take a 16-bit directory as it is"
        )
    settings = read_json(folder / parts[0].component / "config.json")[CONFIG_KEY]
    file = StoredFile(folder, f"SDNQ's {settings.get('weights_dtype', 'int8')!s:.40}", {})
    return SingleFileModel(file, folder, parts[0], OtherParts(parts[1:], {}, {}))


def _quantized(folder: Path) -> list[tuple[str, str, str]]:
    """Return sub-folder, library and class of what SDNQ quantized, denoisers first."""
    if not (folder / "model_index.json").is_file():
        config = read_json(folder / "config.json")
        name = config.get("_class_name")
        library = "diffusers" if isinstance(name, str) else "transformers"
        class_name = str(name) if library == "diffusers" else architecture(folder, config)
        return [("", library, class_name)] if _is_sdnq(folder) else []
    models = read_models(folder)
    first = denoiser_names({name: kind for name, (_, kind) in models.items()})
    names = sorted(models, key=lambda name: (name not in first, name))
    return [(name, *models[name]) for name in names if _is_sdnq(folder / name)]


def _is_sdnq(folder: Path) -> bool:
    """Tell whether SDNQ quantized a component; one of another tool is refused."""
    config = folder / "config.json"
    entry = read_json(config).get(CONFIG_KEY)
    if entry is None:
        return False
    find_quantizer(entry, config)
    if (name := name_quantizer(entry)) != "SDNQ":
        raise ModelError(
            f"{folder}: quantized by {name}, expected SDNQ; start from the 16-bit model that it "
            "came from"
        )
    _check_settings(config, entry)
    return True


def _check_settings(config: Path, entry: Mapping[str, Any]) -> None:
    """Refuse what was done to numbers and is not undone here."""
    own = _object(config, entry, "modules_quant_config")
    settings = {"all layers": entry, **{layer: _object(config, own, layer) for layer in own}}
    formats = [(layer, each.get("weights_dtype", "int8")) for layer, each in settings.items()]
    for name, layers in _object(config, entry, "modules_dtype_dict").items():
        formats.append((some(map(str, layers)) if isinstance(layers, list) else str(layers), name))
    for layer, each in settings.items():
        _check_keys(config, layer, each)
    for layer, name in formats:
        if not _READ.fullmatch(str(name).lower()):
            raise ModelError(
                f"{config}: {layer:.200}: weights_dtype {name!s:.60}, expected int2 to int8, uint2 "
                f"to uint8, float8_e4m3fn or float8_e5m2; {_CURE}"
            )


def _check_keys(config: Path, layer: str, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if key in _PLAIN and value not in _PLAIN[key]:
            raise ModelError(
                f"{config}: {layer:.200}: {key} {value!s:.60}, expected none of it; {_CURE}"
            )
        if key not in _PLAIN and key not in _KNOWN and value:
            raise ModelError(
                f"{config}: {layer:.200}: {key!r:.60}, which may change what the codes mean and is "
                f"not known; {_CURE}"
            )
    if settings.get("use_svd") and settings.get("use_quantized_matmul"):
        raise ModelError(
            f"{config}: {layer:.200}: use_svd with use_quantized_matmul, expected one of them; "
            f"{_CURE}"
        )


def _object(config: Path, entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = entry.get(key) or {}
    if not isinstance(found, Mapping):
        raise ModelError(
            f"{config}: {key!s:.200} is a {type(found).__name__}, expected an object; download it "
            "again"
        )
    return found


def _part(folder: Path, component: str, library: str, class_name: str) -> Part:
    """Return a component whose tensors are all there."""
    path = folder / component
    found = {
        name: _Place(shard, info)
        for shard in find_weights(path, library, class_name, None).shards
        for name, info in read_header(shard).tensors.items()
    }
    of_diffusers = library != "transformers"
    shapes = _shapes(path, "" if of_diffusers else class_name, found)
    layers = {name: _places(name, found, shapes) for name in shapes.keys() & found.keys()}
    used = {place.info.name for places in layers.values() for place in places.values()}
    for what, names in (("lacks", shapes.keys() - used), ("has besides", found.keys() - used)):
        if names:
            raise ModelError(f"{path}: {what} {some(names)} for a {class_name}; {_CURE}")
    file = StoredFile(path, "SDNQ", {n: _weight(n, layers[n], shapes[n]) for n in shapes})
    naming = Naming("diffusers" if of_diffusers else "transformers", "", own_names(shapes))
    pieces = pieces_of(file, naming, ModelShapes(path, class_name, shapes))
    return Part(component, naming.layout, WEIGHTS if of_diffusers else ENCODER_WEIGHTS, pieces)


def _shapes(
    path: Path, class_name: str, found: Mapping[str, _Place]
) -> Mapping[str, tuple[int, ...]]:
    names = {name for name in found if name.rpartition(".")[2] not in PARTS}
    try:
        return read_skeleton(path / "config.json", class_name, names, tensors=len(found)).tensors
    except CheckpointError as error:
        raise ModelError(str(error)) from error


def _places(
    name: str, found: Mapping[str, _Place], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, _Place]:
    """Return a tensor of the model, as "weight", and the tensors of SDNQ that belong to it."""
    layer, _, kind = name.rpartition(".")
    parts = {part: f"{layer}.{part}" for part in PARTS} if kind == "weight" else {}
    # A model may have a parameter of such a name.
    own = {part: found[n] for part, n in parts.items() if n in found and n not in shapes}
    return {"weight": found[name], **own}


def _weight(name: str, places: Mapping[str, _Place], shape: tuple[int, ...]) -> StoredTensor:
    weight = places["weight"]
    if len(places) == 1 and weight.info.dtype in PLAIN:
        return SafetensorsWeight(weight.path, weight.info, None, "")
    return SdnqWeight(name, shape, places)
