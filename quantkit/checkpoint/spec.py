"""FORMAT.md as types, for reader, writer and loaders: the config and the tensors of a layer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from quantkit._version import __version__
from quantkit.checkpoint.packed_attention import KEY as ATTENTION_KEY
from quantkit.checkpoint.packed_attention import PackedAttention, parse_attention
from quantkit.checkpoint.schemes import check_keys, parse_scheme, scheme_to_json
from quantkit.errors import CheckpointError
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.numerics.granularity import scale_shape
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.storage.tensorfile import ITEM_BYTES

#: Files of another version are refused.
FORMAT_VERSION = 1
QUANT_METHOD = "quantkit"

#: The tensors that a packed layer may own besides its bias.
PACKED_PARTS = (
    "weight", "weight_meta", "weight_group", "weight_scale", "input_scale", "input_smooth",
)  # fmt: skip

Kind = Literal["linear", "conv2d"]

_CONFIG_KEYS = ("quant_method", "format_version", "quantkit_version", "schemes")


@dataclass(frozen=True)
class TensorSpec:
    """The expected dtype and shape of a packed layer's tensor."""

    name: str
    #: the dtype's name in a safetensors header
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class SchemeEntry:
    """One treatment and the layers that have it."""

    scheme: Scheme
    #: module paths inside the component, ascending
    layers: tuple[str, ...]


@dataclass(frozen=True)
class PackedConfig:
    """The quantization_config of a packed component."""

    quantkit_version: str
    schemes: tuple[SchemeEntry, ...]
    #: None: in 16 bit
    attention: PackedAttention | None = None

    @cached_property
    def layers(self) -> dict[str, Scheme]:
        """Every packed layer with its treatment."""
        return {name: entry.scheme for entry in self.schemes for name in entry.layers}

    def scheme_of(self, layer: str) -> Scheme | None:
        """Return the treatment of ``layer``; None when it stays in 16 bit."""
        return self.layers.get(layer)

    def to_json(self) -> dict[str, Any]:
        """Return FORMAT.md's ``quantization_config``."""
        attention = {} if self.attention is None else {ATTENTION_KEY: self.attention.to_json()}
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "quantkit_version": self.quantkit_version,
            **attention,
            "schemes": [
                {**scheme_to_json(entry.scheme), "layers": list(entry.layers)}
                for entry in self.schemes
            ],
        }


def make_config(
    schemes: Mapping[str, Scheme], attention: PackedAttention | None = None
) -> PackedConfig:
    """Return the config of layers and their treatments, equal treatments gathered.

    Args:
        schemes: module path to treatment.
        attention: None: in 16 bit.
    """
    gathered: dict[Scheme, list[str]] = {}
    for layer, scheme in sorted(schemes.items()):
        gathered.setdefault(scheme, []).append(layer)
    entries = tuple(SchemeEntry(scheme, tuple(layers)) for scheme, layers in gathered.items())
    return PackedConfig(__version__, entries, attention)


def parse_config(config: Mapping[str, Any]) -> PackedConfig:
    """Return the quantization_config as a value.

    Raises:
        CheckpointError: another version, an unknown or missing key, an unknown value, a layer with
            two schemes.
    """
    check_version(config.get("format_version"), CONFIG_KEY)
    check_keys(config, _CONFIG_KEYS, CONFIG_KEY, optional=(ATTENTION_KEY,))
    if config["quant_method"] != QUANT_METHOD:
        raise CheckpointError(
            f"{CONFIG_KEY}: quant_method {config['quant_method']!r:.80}, expected {QUANT_METHOD!r}"
        )
    version, schemes = config["quantkit_version"], config["schemes"]
    if not isinstance(version, str) or not isinstance(schemes, list) or not schemes:
        raise CheckpointError(
            f"{CONFIG_KEY}: expected quantkit_version as text and a list of schemes with at least "
            "one; pack the model again"
        )
    entries = tuple(
        SchemeEntry(*parse_scheme(item, f"{CONFIG_KEY}: scheme {index}"))
        for index, item in enumerate(schemes)
    )
    _check_distinct(entries)
    attention = None
    if ATTENTION_KEY in config:
        attention = parse_attention(config[ATTENTION_KEY], CONFIG_KEY)
    return PackedConfig(version, entries, attention)


def check_version(found: object, where: str) -> None:
    """Refuse another version of the format.

    Raises:
        CheckpointError: naming both.
    """
    if type(found) is not int or found != FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format_version {found!r:.80}, expected {FORMAT_VERSION}: made by a "
            "development version or a newer quantkit; pack the model again, or upgrade"
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
        weight, weight_meta (sparse), weight_group (int4), weight_scale, input_scale (static),
        input_smooth, bias.

    Raises:
        CheckpointError: the shape does not fit the kind, or does not divide as the scheme wants.
    """
    if kind != kind_of(shape) or len(shape) not in (2, 4) or min(shape) < 1:
        raise CheckpointError(f"{layer}: dense shape {list(shape)} is not that of a {kind} weight")
    check_divides(layer, scheme, shape)
    n, k = rows_of(shape)
    codes = scheme.weight.safetensors_dtype
    specs = [TensorSpec(f"{layer}.weight", codes, _weight_shape(scheme, shape))]
    if scheme.sparsity is not None:
        specs.append(TensorSpec(f"{layer}.weight_meta", "U8", (n, k // 8)))
    if scheme.weight.subscale_group:
        groups = k // scheme.weight.subscale_group
        specs.append(TensorSpec(f"{layer}.weight_group", "I8", (n, groups)))
    scales = scale_shape(scheme.granularity, n, k)
    specs.append(TensorSpec(f"{layer}.weight_scale", scheme.weight.scale_dtype, scales))
    buckets = (len(scheme.buckets) + 1,) if scheme.buckets else ()
    if scheme.activation is Activation.STATIC:
        specs.append(TensorSpec(f"{layer}.input_scale", "F32", buckets))
    if scheme.smooth:
        specs.append(TensorSpec(f"{layer}.input_smooth", "F32", (shape[1],)))
    if bias_dtype is not None:
        specs.append(TensorSpec(f"{layer}.bias", bias_dtype, (n,)))
    return tuple(specs)


def attention_tensors(attention: PackedAttention | None) -> tuple[TensorSpec, ...]:
    """Return the tensors of an attention entry."""
    shapes = () if attention is None else attention.tensor_shapes()
    return tuple(TensorSpec(name, "F32", shape) for name, shape in shapes)


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
    group = scheme.weight.subscale_group
    if group and channels % group:
        raise CheckpointError(
            f"{layer}: {axis} {channels} is not a multiple of {group}, which {scheme.weight.name} "
            "needs"
        )
    size = getattr(scheme.granularity, "size", 1)
    if channels % size:
        raise CheckpointError(
            f"{layer}: {axis} {channels} is not a multiple of the group size {size}"
        )


def _weight_shape(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    n, k = rows_of(shape)
    per_byte = scheme.weight.codes_per_byte
    if scheme.sparsity is not None:
        return n, k // 2 // per_byte
    if per_byte > 1:
        return n, k // per_byte
    if len(shape) == 4:
        _, channels, kh, kw = shape
        return n, kh, kw, channels
    return n, k


def _check_distinct(entries: tuple[SchemeEntry, ...]) -> None:
    counts = Counter(layer for entry in entries for layer in entry.layers)
    for layer, count in counts.items():
        if count > 1:
            name = f"layer {layer!r:.200}"
            raise CheckpointError(f"{CONFIG_KEY}: {name} is listed {count} times, expected once")
