"""FORMAT.md as types: the quantization_config and the tensors of a layer.

Pure values without files: the reader, the writer and the loaders all agree through these.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, Literal

from quantkit import __version__
from quantkit.errors import CheckpointError, InputError
from quantkit.numerics.formats import FloatFormat, find_format
from quantkit.numerics.granularity import parse_granularity, scale_shape
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme

FORMAT_VERSION = 1
QUANT_METHOD = "quantkit"
#: The key of config.json that holds the schemes.
CONFIG_KEY = "quantization_config"

#: The tensors that a packed layer may own besides its bias.
PACKED_PARTS = ("weight", "weight_meta", "weight_scale", "input_scale", "input_smooth")

#: Names that FORMAT.md keeps for later: a reader of this version refuses them.
RESERVED_WEIGHTS = ("int8", "int4")

Kind = Literal["linear", "conv2d"]

_CONFIG_KEYS = ("quant_method", "format_version", "quantkit_version", "schemes")
_SCHEME_KEYS = ("weight", "granularity", "sparsity", "activation", "buckets", "smooth", "layers")


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of a packed layer must look like."""

    name: str
    #: the dtype's name in a safetensors header
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SchemeEntry:
    """One treatment and the layers that have it."""

    scheme: Scheme
    #: module paths inside the component, ascending
    layers: tuple[str, ...]


@dataclass(frozen=True)
class PackedConfig:
    """The quantization_config of a packed component."""

    format_version: int
    quantkit_version: str
    schemes: tuple[SchemeEntry, ...]

    @property
    def layers(self) -> dict[str, Scheme]:
        """Every packed layer with its treatment."""
        return {name: entry.scheme for entry in self.schemes for name in entry.layers}

    def scheme_of(self, layer: str) -> Scheme | None:
        """Return the treatment of ``layer``; None when it stays in 16 bit."""
        return self.layers.get(layer)

    def to_json(self) -> dict[str, Any]:
        """Return FORMAT.md's ``quantization_config``."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": self.format_version,
            "quantkit_version": self.quantkit_version,
            "schemes": [_scheme_to_json(entry) for entry in self.schemes],
        }


def make_config(schemes: Mapping[str, Scheme]) -> PackedConfig:
    """Return the config of layers and their treatments, equal treatments gathered.

    Args:
        schemes: module path to treatment.
    """
    gathered: dict[Scheme, list[str]] = {}
    for layer, scheme in sorted(schemes.items()):
        gathered.setdefault(scheme, []).append(layer)
    entries = tuple(SchemeEntry(scheme, tuple(layers)) for scheme, layers in gathered.items())
    return PackedConfig(FORMAT_VERSION, __version__, entries)


def parse_config(config: Mapping[str, Any]) -> PackedConfig:
    """Return the quantization_config as a value.

    Raises:
        CheckpointError: a newer version (both are named), an unknown or missing key, an unknown
            value, a layer with two schemes.
    """
    check_version(config.get("format_version"), CONFIG_KEY)
    check_keys(config, _CONFIG_KEYS, CONFIG_KEY)
    if config["quant_method"] != QUANT_METHOD:
        raise CheckpointError(
            f"{CONFIG_KEY}: quant_method {config['quant_method']!r}, wanted {QUANT_METHOD!r}"
        )
    version, schemes = config["quantkit_version"], config["schemes"]
    if not isinstance(version, str) or not isinstance(schemes, list) or not schemes:
        raise CheckpointError(
            f"{CONFIG_KEY}: wanted quantkit_version as text and a list of schemes with at least "
            "one; pack the model again"
        )
    entries = tuple(_parse_scheme(item, index) for index, item in enumerate(schemes))
    _check_distinct(entries)
    return PackedConfig(FORMAT_VERSION, version, entries)


def check_version(found: object, where: str) -> None:
    """Refuse a format version that this quantkit does not read.

    Raises:
        CheckpointError: newer (naming both versions), or no positive integer.
    """
    if type(found) is not int or found < 1:
        raise CheckpointError(f"{where}: format_version {found!r}, wanted {FORMAT_VERSION}")
    if found > FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format_version {found} is newer than {FORMAT_VERSION}, the newest that "
            f"quantkit {__version__} reads; upgrade quantkit"
        )


def check_keys(found: Mapping[str, Any], wanted: tuple[str, ...], where: str) -> None:
    """Refuse missing and unknown keys: a reader ignores nothing silently.

    Raises:
        CheckpointError: naming the first key that is missing or unknown.
    """
    for key in wanted:
        if key not in found:
            raise CheckpointError(f"{where}: key {key!r} is missing; pack the model again")
    for key in found:
        if key not in wanted:
            raise CheckpointError(
                f"{where}: unknown key {key!r}, wanted {', '.join(wanted)}; upgrade quantkit"
            )


def kind_of(shape: tuple[int, ...]) -> Kind:
    """Return the kind of module that owns a dense weight of ``shape``."""
    return "conv2d" if len(shape) == 4 else "linear"


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return N and K of a dense weight: (N, K) or (N, C, kh, kw) with K = kh * kw * C."""
    return shape[0], prod(shape[1:])


def layer_tensors(
    layer: str,
    scheme: Scheme,
    kind: Kind,
    shape: tuple[int, ...],
    *,
    bias_dtype: str | None,
) -> tuple[TensorSpec, ...]:
    """Return the tensors of a packed layer.

    Args:
        layer: module path inside the component.
        scheme: its treatment.
        kind: "linear" or "conv2d".
        shape: dense weight of the module: (N, K), or (N, C, kh, kw).
        bias_dtype: the bias' dtype as safetensors names it; None without a bias.

    Returns:
        weight, weight_meta (sparse), weight_scale, input_scale (static), input_smooth, bias.

    Raises:
        CheckpointError: the shape does not fit the kind, or does not divide as the scheme wants.
    """
    if kind != kind_of(shape) or len(shape) not in (2, 4) or min(shape) < 1:
        raise CheckpointError(f"{layer}: dense shape {list(shape)} is no weight of a {kind}")
    check_divides(layer, scheme, shape)
    n, k = rows_of(shape)
    codes = scheme.weight.safetensors_dtype
    specs = [TensorSpec(f"{layer}.weight", codes, _weight_shape(scheme, shape))]
    if scheme.sparsity is not None:
        specs.append(TensorSpec(f"{layer}.weight_meta", "U8", (n, k // 8)))
    scales = scale_shape(scheme.granularity, n, k)
    specs.append(TensorSpec(f"{layer}.weight_scale", "F32", scales))
    if scheme.activation is Activation.STATIC:
        buckets = (len(scheme.buckets) + 1,) if scheme.buckets else ()
        specs.append(TensorSpec(f"{layer}.input_scale", "F32", buckets))
    if scheme.smooth:
        specs.append(TensorSpec(f"{layer}.input_smooth", "F32", (shape[1],)))
    if bias_dtype is not None:
        specs.append(TensorSpec(f"{layer}.bias", bias_dtype, (n,)))
    return tuple(specs)


def check_divides(layer: str, scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Refuse a dense shape that the sparsity or the group size of a scheme does not divide.

    Raises:
        CheckpointError: naming the layer, the dimension and the divisor.
    """
    axis, channels, k = "C" if len(shape) == 4 else "K", shape[1], rows_of(shape)[1]
    if scheme.sparsity is not None and channels % 4:
        raise CheckpointError(f"{layer}: {axis} {channels} is not a multiple of 4, which 2:4 needs")
    if scheme.sparsity is not None and k % 8:
        raise CheckpointError(f"{layer}: K {k} is not a multiple of 8, which weight_meta needs")
    size = getattr(scheme.granularity, "size", 1)
    if channels % size:
        raise CheckpointError(
            f"{layer}: {axis} {channels} is not a multiple of the group size {size}"
        )


def _weight_shape(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    n, k = rows_of(shape)
    if scheme.sparsity is not None:
        return n, k // 2
    if len(shape) == 4:
        _, channels, kh, kw = shape
        return n, kh, kw, channels
    return n, k


def _scheme_to_json(entry: SchemeEntry) -> dict[str, Any]:
    scheme = entry.scheme
    return {
        "weight": scheme.weight.name,
        "granularity": str(scheme.granularity),
        "sparsity": None if scheme.sparsity is None else str(scheme.sparsity),
        "activation": scheme.activation.value,
        "buckets": list(scheme.buckets) or None,
        "smooth": scheme.smooth,
        "layers": list(entry.layers),
    }


def _parse_scheme(item: object, index: int) -> SchemeEntry:
    where = f"{CONFIG_KEY}: scheme {index}"
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: found {type(item).__name__}, wanted a JSON object")
    check_keys(item, _SCHEME_KEYS, where)
    try:
        granularity = parse_granularity(_text(item["granularity"]))
        weight = _parse_weight(_text(item["weight"]))
        activation = Activation(item["activation"])
        buckets = _parse_buckets(item["buckets"], activation)
    except (InputError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    if item["sparsity"] not in (None, str(TWO_OF_FOUR)):
        raise CheckpointError(f"{where}: sparsity {item['sparsity']!r}, wanted null or '2:4'")
    if type(item["smooth"]) is not bool:
        raise CheckpointError(f"{where}: smooth {item['smooth']!r}, wanted true or false")
    sparsity = TWO_OF_FOUR if item["sparsity"] else None
    scheme = Scheme(weight, granularity, sparsity, activation, buckets, item["smooth"])
    return SchemeEntry(scheme, _parse_layers(item["layers"], where))


def _parse_weight(name: str) -> FloatFormat:
    if name in RESERVED_WEIGHTS:
        raise CheckpointError(f"weight {name!r} is reserved, not read by quantkit {__version__}")
    return find_format(name)


def _parse_buckets(value: object, activation: Activation) -> tuple[float, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(type(v) in (int, float) for v in value):
        raise CheckpointError(f"buckets {value!r}, wanted null or a list of timesteps")
    edges = tuple(float(v) for v in value)
    if not all(isfinite(edge) for edge in edges) or list(edges) != sorted(set(edges)):
        raise CheckpointError(f"buckets {value!r}, wanted ascending, distinct, finite timesteps")
    if activation is not Activation.STATIC:
        raise CheckpointError(f"buckets with activation {activation.value!r}, wanted 'static'")
    return edges


def _parse_layers(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{where}: layers is no list of module paths; pack the model again")
    if not value:
        raise CheckpointError(f"{where}: no layers; a scheme without layers must not be written")
    return tuple(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"found {value!r}, wanted text")
    return value


def _check_distinct(entries: tuple[SchemeEntry, ...]) -> None:
    counts = Counter(layer for entry in entries for layer in entry.layers)
    for layer, count in counts.items():
        if count > 1:
            raise CheckpointError(f"{CONFIG_KEY}: layer {layer!r} stands in the schemes {count}x")
