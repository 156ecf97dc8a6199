"""The rules of FORMAT.md that need the data: finite numbers, legal codes, checksums."""

import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.checkpoint.code_rules import faults_of
from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.spec import PACKED_PARTS, attention_tensors
from quantkit.checkpoint.weight_reader import NUMBERS, SourceTensor, first_broken, value_of
from quantkit.device.host.checker import BAD_CODE, BAD_FACTOR, BAD_META, BAD_SCALE
from quantkit.errors import NonFiniteError
from quantkit.storage.digest import ExpectedDigest
from quantkit.storage.system import open_to_read
from quantkit.storage.tensorfile import ITEM_BYTES, TensorInfo

_SCALES = ("weight_scale", "input_scale", "input_smooth")

#: Bytes that are looked at together; a multiple of every item size.
_CHUNK_BYTES = 1 << 20


def broken_scales(component: PackedComponent) -> Iterator[str]:
    """Yield a line for every scale or factor that is not finite and positive."""
    for layer, scheme in component.config.layers.items():
        for part in _SCALES:
            any_sign = part == "weight_scale" and bool(scheme.weight.block)
            yield from _broken_values(component, f"{layer}.{part}", any_sign=any_sign)
    if component.config.attention is None:
        return
    from quantkit.numerics.attention_scales import POSITIVE

    for spec in attention_tensors(component.config.attention):
        any_sign = spec.name.rpartition(".")[2] not in POSITIVE
        yield from _broken_values(component, spec.name, any_sign=any_sign)


def _broken_values(component: PackedComponent, name: str, *, any_sign: bool) -> Iterator[str]:
    if name not in component.tensors:
        return
    values, dtype = component.read_bytes(name), component.tensors[name][1].dtype
    bad = first_broken(values, dtype, positive=not any_sign)
    if bad is not None:
        expected = "finite" if any_sign else "finite and positive"
        found = value_of(values, dtype, bad)
        yield f"{_where(component, name)}: found {found}, expected {expected}"


def expected_digests(component: PackedComponent) -> dict[str, ExpectedDigest]:
    """Return the expected digest of every tensor, by its name."""
    return {
        name: ExpectedDigest(
            shard.header.path, f"{name}: ", info.start, info.stop, shard.metadata.tensors[name]
        )
        for shard in component.shards
        for name, info in shard.header.tensors.items()
    }


def unpacked_tensors(component: PackedComponent) -> list[tuple[Path, TensorInfo]]:
    """Return the tensors that packing left as they were, biases among them, and their files."""
    parts = packed_names(component)
    return [where for name, where in component.tensors.items() if name not in parts]


def packed_names(component: PackedComponent) -> frozenset[str]:
    """Return the names that tensors of packed layers may have, except biases."""
    layers = component.config.layers
    return frozenset(f"{layer}.{part}" for layer in layers for part in PACKED_PARTS)


def broken_numbers(path: Path, info: TensorInfo) -> Iterator[str]:
    """Yield a line if a float tensor holds NaN or infinity, which no trained weight is."""
    if info.dtype not in NUMBERS:
        return
    width = ITEM_BYTES[info.dtype]
    descriptor = open_to_read(path)
    try:
        source = SourceTensor(path, descriptor, info)
        for index, chunk in enumerate(source.chunks(_CHUNK_BYTES)):
            source.check_finite(chunk, index * _CHUNK_BYTES // width)
    except NonFiniteError as error:
        yield f"{error}; the file says so itself: take the weights from elsewhere"
    finally:
        os.close(descriptor)


def broken_weight(component: PackedComponent, layer: str) -> Iterator[str]:
    """Yield a line for every rule that the codes or the metadata of a layer break."""
    scheme = component.config.layers[layer]
    if scheme.weight.block:
        # Files of other programs may hold any code, and any scale with codes of zero.
        return
    where, faults = _where(component, f"{layer}.weight"), faults_of(component, layer)
    if faults.bits & BAD_FACTOR:
        yield f"{where}_group: a factor is 0 or beyond 15; pack the model again"
        return
    if faults.bits & BAD_CODE:
        what = "-128, which no weight has" if scheme.weight.is_integer else "NaN or infinite"
        yield f"{where}: a code is {what}; pack the model again"
    if faults.bits & BAD_META:
        yield f"{where}_meta: a nibble names no two ascending positions; pack the model again"
    elif faults.bits & BAD_SCALE:
        yield f"{where}_scale: found {faults.scale} for an all-zero group, expected 1"


def _where(component: PackedComponent, name: str) -> str:
    return f"{component.tensors[name][0]}: {name}"
