"""The rules of FORMAT.md that need headers only.

Every rule yields the texts of its breaches, so that one pass lists them all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.metadata import LayerRecord, ShardMetadata
from quantkit.checkpoint.packed_attention import CHILD
from quantkit.checkpoint.spec import (
    PACKED_PARTS,
    PackedConfig,
    TensorSpec,
    attention_tensors,
    layer_tensors,
)
from quantkit.checkpoint.tensor_layout import DTYPE_ORDER, file_order
from quantkit.errors import CheckpointError
from quantkit.storage.tensorfile import Header, TensorInfo

#: Dtypes that a bias may have: those of source weights.
BIAS_DTYPES = ("F16", "BF16", "F32")

#: Parts that only packed layers have, so that one without a scheme is a mistake.
_OWN_PARTS = frozenset(PACKED_PARTS) - {"weight"}


@dataclass(frozen=True)
class Shard:
    """The header of one weight file."""

    header: Header
    metadata: ShardMetadata

    @property
    def name(self) -> str:
        """File name."""
        return self.header.path.name


@dataclass(frozen=True)
class Index:
    """The shard index."""

    path: Path
    total_size: int
    #: tensor to file name
    weight_map: Mapping[str, str]


def broken_rules(
    config: PackedConfig, shards: Sequence[Shard], index: Index | None
) -> Iterator[str]:
    """Yield a line for every breach of a rule that headers alone decide."""
    yield from _tensors_are_unique(shards)
    if index is not None:
        yield from _index_agrees(shards, index)
    for shard in shards:
        yield from _order_is_canonical(shard)
        yield from _digests_are_whole(shard)
        yield from _scheme_owns_packed_tensors(config, shard)
    yield from _layers_agree(config, shards)
    yield from _attention_agrees(config, shards)


def _tensors_are_unique(shards: Sequence[Shard]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for shard in shards:
        for name in shard.header.tensors:
            if name in seen:
                yield f"{shard.header.path}: {name}: stands in {seen[name]} too; pack again"
            seen[name] = shard.name


def _index_agrees(shards: Sequence[Shard], index: Index) -> Iterator[str]:
    found = {name: shard.name for shard in shards for name in shard.header.tensors}
    for name in sorted(found.keys() | index.weight_map.keys()):
        if found.get(name) != index.weight_map.get(name):
            yield (
                f"{index.path}: {name}: index says {index.weight_map.get(name)}, found in "
                f"{found.get(name)}; pack again"
            )
    size = sum(info.nbytes for shard in shards for info in shard.header.tensors.values())
    if size != index.total_size:
        yield f"{index.path}: total_size {index.total_size}, found {size} bytes; pack again"


def _order_is_canonical(shard: Shard) -> Iterator[str]:
    found = [TensorSpec(i.name, i.dtype, i.shape) for i in shard.header.tensors.values()]
    unknown = [spec for spec in found if spec.dtype not in DTYPE_ORDER]
    if unknown:
        yield f"{shard.header.path}: {unknown[0].name}: dtype {unknown[0].dtype} is unknown"
        return
    for spec, expected in zip(found, file_order(found), strict=True):
        if spec != expected:
            yield (
                f"{shard.header.path}: {spec.name}: lies where {expected.name} belongs; tensors "
                "are ordered by dtype, then by name"
            )
            return


def _digests_are_whole(shard: Shard) -> Iterator[str]:
    for name in sorted(shard.header.tensors.keys() ^ shard.metadata.tensors.keys()):
        what = "no checksum" if name in shard.header.tensors else "a checksum, but no data"
        yield f"{shard.header.path}: {name}: has {what}; pack again"


def _scheme_owns_packed_tensors(config: PackedConfig, shard: Shard) -> Iterator[str]:
    for info in shard.header.tensors.values():
        layer, _, part = info.name.rpartition(".")
        if config.scheme_of(layer) is None and (part in _OWN_PARTS or info.dtype.startswith("F8_")):
            yield f"{shard.header.path}: {info.name}: packed, but no scheme has layer {layer!r}"


def _layers_agree(config: PackedConfig, shards: Sequence[Shard]) -> Iterator[str]:
    schemes = config.layers
    records = {name: shard for shard in shards for name in shard.metadata.layers}
    for name in sorted(records.keys() - schemes.keys()):
        yield f"{records[name].header.path}: layer {name}: described, but no scheme has it"
    biases = {i.name: i for shard in shards for i in shard.header.tensors.values()}
    for name in sorted(schemes):
        if name not in records:
            yield f"{shards[0].header.path.parent}: layer {name}: has a scheme, but no description"
        else:
            shard = records[name]
            record = shard.metadata.layers[name]
            yield from _layer_agrees(config, shard, name, record, biases.get(f"{name}.bias"))


def _attention_agrees(config: PackedConfig, shards: Sequence[Shard]) -> Iterator[str]:
    """Compare the stored scales of attention with what the config names."""
    found = {i.name: (shard, i) for shard in shards for i in shard.header.tensors.values()}
    expected = {spec.name: spec for spec in attention_tensors(config.attention)}
    for name, spec in expected.items():
        if name not in found:
            where = shards[0].header.path.parent
            yield f"{where}: {name}: missing, expected {spec.dtype} {list(spec.shape)}"
            continue
        shard, info = found[name]
        if (info.dtype, info.shape) != (spec.dtype, spec.shape):
            yield _unlike(shard.header.path, spec, info)
    for name, (shard, _) in found.items():
        if f".{CHILD}." in name and name not in expected:
            yield f"{shard.header.path}: {name}: scales of attention that the config does not name"


def _unlike(where: Path, spec: TensorSpec, found: TensorInfo) -> str:
    return (
        f"{where}: {spec.name}: found {found.dtype} {list(found.shape)}, expected "
        f"{spec.dtype} {list(spec.shape)}"
    )


def _layer_agrees(
    config: PackedConfig, shard: Shard, name: str, record: LayerRecord, bias: TensorInfo | None
) -> Iterator[str]:
    """Compare the tensors of one layer with what its scheme and shape ask for."""
    scheme = config.layers[name]
    where, bias_dtype = shard.header.path, None if bias is None else bias.dtype
    try:
        expected = layer_tensors(name, scheme, record.kind, record.shape, bias_dtype=bias_dtype)
    except CheckpointError as error:
        yield f"{where}: {error}"
        return
    if bias is not None and bias_dtype not in BIAS_DTYPES:
        yield f"{where}: {bias.name}: {bias_dtype}, expected one of {', '.join(BIAS_DTYPES)}"
    for spec in expected:
        is_bias = bias is not None and spec.name == bias.name
        # A bias may lie in another shard than its weight, as in the source.
        found = bias if is_bias else shard.header.tensors.get(spec.name)
        if found is None:
            yield f"{where}: {spec.name}: missing, expected {spec.dtype} {list(spec.shape)}"
        elif (found.dtype, found.shape) != (spec.dtype, spec.shape):
            yield _unlike(where, spec, found)
    names = {spec.name for spec in expected}
    for part in PACKED_PARTS:
        extra = f"{name}.{part}"
        if extra in shard.header.tensors and extra not in names:
            yield f"{where}: {extra}: not asked for by the layer's scheme"
