"""The rules of FORMAT.md that need the data: finite numbers, legal codes, checksums."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.spec import PACKED_PARTS, attention_tensors
from quantkit.checkpoint.weight_reader import NUMBER_DTYPES, SourceTensor
from quantkit.errors import NonFiniteError
from quantkit.numerics.attention_scales import POSITIVE
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.nibbles import factors_are_legal
from quantkit.numerics.packing import metadata_is_legal, unpack_two_of_four
from quantkit.numerics.scheme import Scheme
from quantkit.storage.digest import Claim
from quantkit.storage.system import open_to_read
from quantkit.storage.tensorfile import TensorInfo

_SCALES = ("weight_scale", "input_scale", "input_smooth")
_SHIFTS = ("input_shift", "output_shift")

#: Bytes that are looked at together; a multiple of every item size.
_CHUNK_BYTES = 1 << 20


def broken_scales(component: PackedComponent) -> Iterator[str]:
    """Yield a line for every scale or factor that is not finite and positive, and every shift."""
    for layer, scheme in component.config.layers.items():
        for part in (*_SCALES, *_SHIFTS):
            any_sign = part in _SHIFTS or (part == "weight_scale" and bool(scheme.weight.block))
            yield from _broken_values(component, f"{layer}.{part}", any_sign=any_sign)
    for spec in attention_tensors(component.config.attention):
        any_sign = spec.name.rpartition(".")[2] not in POSITIVE
        yield from _broken_values(component, spec.name, any_sign=any_sign)


def _broken_values(component: PackedComponent, name: str, *, any_sign: bool) -> Iterator[str]:
    if name not in component.tensors:
        return
    values = component.read(name).flatten()
    bad = ~torch.isfinite(values) | ((values <= 0) & (not any_sign))
    if bool(bad.any()):
        wanted = "finite" if any_sign else "finite and positive"
        yield f"{_where(component, name)}: found {float(values[bad][0])}, wanted {wanted}"


def tensor_claims(component: PackedComponent) -> Iterator[Claim]:
    """Yield what the bytes of every tensor must hash to."""
    for shard in component.shards:
        for name, info in shard.header.tensors.items():
            digest = shard.metadata.tensors[name]
            yield Claim(shard.header.path, f"{name}: ", info.start, info.stop, digest)


def unpacked_tensors(component: PackedComponent) -> list[tuple[Path, TensorInfo]]:
    """Return the tensors that packing left as they were, biases among them, and their files."""
    parts = {f"{layer}.{part}" for layer in component.config.layers for part in PACKED_PARTS}
    return [where for name, where in component.tensors.items() if name not in parts]


def broken_numbers(path: Path, info: TensorInfo) -> Iterator[str]:
    """Yield a line if a float tensor holds NaN or infinity, which no trained weight is."""
    if info.dtype not in NUMBER_DTYPES:
        return
    width = NUMBER_DTYPES[info.dtype].itemsize
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
    scheme, parts = component.config.layers[layer], component.parts(layer)
    if scheme.weight.block:
        # Files of other programs hold every code, and every scale beside codes of zero.
        return
    where = _where(component, f"{layer}.weight")
    groups = parts.get("weight_group")
    if groups is not None and not factors_are_legal(groups):
        yield f"{where}_group: a factor is 0 or beyond 15; pack the model again"
        return
    sizes, largest = _sizes(parts, scheme)
    if int(sizes.max()) > largest:
        what = "-128, which no weight has" if scheme.weight.is_integer else "NaN or infinite"
        yield f"{where}: a code is {what}; pack the model again"
    meta = parts.get("weight_meta")
    if meta is not None and not metadata_is_legal(meta):
        yield f"{where}_meta: a nibble names no two ascending positions; pack the model again"
        return
    scale = parts["weight_scale"]
    zero = _zero_groups(sizes, meta, scheme) & (scale != 1)
    if bool(zero.any()):
        yield f"{where}_scale: found {float(scale[zero][0])} for an all-zero group, wanted 1"


def _sizes(parts: Mapping[str, Tensor], scheme: Scheme) -> tuple[Tensor, int]:
    """Return bytes (R, any) in the order of the codes' magnitudes, and the largest of a number.

    Zero is 0. Codes are never decoded, which would take eight times their bytes and many passes.
    """
    if "weight_group" in parts:
        # Two nibbles, of which 8 is zero; with legal factors, all of them are numbers.
        return parts["weight"].flatten(1) ^ 0x88, 0xFF
    fmt, codes = scheme.weight.byte_format, parts["weight"].flatten(1)
    largest = int(torch.tensor(fmt.max).to(fmt.torch_dtype).view(torch.uint8))
    if fmt.is_integer:
        # -128 has no negative: as a byte it is beyond 127.
        return codes.view(torch.int8).abs().view(torch.uint8), largest
    return codes.view(torch.uint8) & 0x7F, largest


def _zero_groups(sizes: Tensor, meta: Tensor | None, scheme: Scheme) -> Tensor:
    """Return which scales serve only zeros, of the scales' shape."""
    match scheme.granularity:
        case PerTensor():
            return sizes.amax() == 0
        case PerChannel():
            return sizes.amax(dim=1) == 0
        case PerGroup(size):
            dense = sizes if meta is None else unpack_two_of_four(sizes, meta)
            return dense.reshape(len(dense), -1, size).amax(dim=2) == 0


def _where(component: PackedComponent, name: str) -> str:
    return f"{component.tensors[name][0]}: {name}"
