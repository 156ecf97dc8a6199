"""Checks of a packed layer's codes, by the compiled core or by PyTorch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.device.host import checker
from quantkit.device.host.checker import BAD_CODE, BAD_FACTOR, BAD_META, BAD_SCALE
from quantkit.device.host.encoder import address
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.storage.system import open_to_read, read_into

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from quantkit.checkpoint.component import PackedComponent
    from quantkit.numerics.scheme import Scheme

#: Bytes of codes that are looked at together.
_CHUNK_BYTES = 1 << 20

#: The tensors that the core looks at, and its names of them.
_FIELDS = {
    "weight": "codes",
    "weight_meta": "meta",
    "weight_group": "factors",
    "weight_scale": "scale",
}


@dataclass(frozen=True)
class Faults:
    """Faults of a layer's packed weight."""

    #: ``BAD_CODE`` and so on; with illegal factors or metadata, what depends on them is not told
    bits: int
    #: with ``BAD_SCALE``: the first scale of a group of zeros that is not 1
    scale: float = 1.0


def faults_of(component: PackedComponent, layer: str) -> Faults:
    """Return the faults of a layer's codes, factors, metadata and scales.

    Raises:
        OSError: the file cannot be read, or ends early.
    """
    scheme = component.config.layers[layer]
    if checker.why_unavailable() or scheme.weight.name not in checker.CODES:
        return _by_torch(component.parts(layer), scheme)
    return _by_core(component, layer)


def _by_core(component: PackedComponent, layer: str) -> Faults:
    scheme = component.config.layers[layer]
    one_scale = isinstance(scheme.granularity, PerTensor)
    rows = component.records[layer].shape[0]
    parts = [p for p in _FIELDS if f"{layer}.{p}" in component.tensors]
    per_row = {p: component.tensors[f"{layer}.{p}"][1].nbytes // rows for p in parts}
    if one_scale:
        del per_row["weight_scale"]
    job = checker.Check(
        row_bytes=per_row["weight"],
        meta_bytes=per_row.get("weight_meta", 0),
        row_factors=per_row.get("weight_group", 0),
        groups=1 if one_scale else per_row["weight_scale"] // 4,
        kind=checker.CODES.index(scheme.weight.name),
    )
    bits, scale = 0, 1.0
    for _ in _blocks(component, layer, job, per_row):
        wrong = checker.check_codes(job)
        if wrong & BAD_SCALE & ~bits:
            scale = job.found
        bits |= wrong
    if one_scale and job.largest == 0:
        scale = float(component.read(f"{layer}.weight_scale"))
        bits |= BAD_SCALE if scale != 1 else 0
    return Faults(bits, scale)


def _blocks(
    component: PackedComponent, layer: str, job: checker.Check, per_row: Mapping[str, int]
) -> Iterator[None]:
    """Fill the job with one block of rows after another."""
    rows = component.records[layer].shape[0]
    count = max(1, min(rows, _CHUNK_BYTES // per_row["weight"]))
    buffers = {part: bytearray(count * size) for part, size in per_row.items()}
    for part, buffer in buffers.items():
        setattr(job, _FIELDS[part], address(buffer))
    places = {part: component.tensors[f"{layer}.{part}"] for part in per_row}
    descriptors = {path: open_to_read(path) for path in {path for path, _ in places.values()}}
    try:
        for first in range(0, rows, count):
            job.rows = min(count, rows - first)
            for part, (path, info) in places.items():
                view = memoryview(buffers[part])[: job.rows * per_row[part]]
                _fill(descriptors[path], view, info.start + first * per_row[part])
            yield
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _fill(descriptor: int, view: memoryview, position: int) -> None:
    while view:
        count = read_into(descriptor, view, position)
        if count == 0:
            raise OSError(f"the file ends at byte {position}")
        view, position = view[count:], position + count


def _by_torch(parts: Mapping[str, Tensor], scheme: Scheme) -> Faults:
    from quantkit.numerics.nibbles import factors_are_legal
    from quantkit.numerics.packed_2to4 import metadata_is_legal

    factors, meta = parts.get("weight_group"), parts.get("weight_meta")
    if factors is not None and not factors_are_legal(factors):
        return Faults(BAD_FACTOR)
    sizes, largest = _sizes(parts, scheme)
    bits = BAD_CODE if int(sizes.max()) > largest else 0
    if meta is not None and not metadata_is_legal(meta):
        return Faults(bits | BAD_META)
    scale = parts["weight_scale"]
    zero = _zero_groups(sizes, meta, scheme) & (scale != 1)
    if bool(zero.any()):
        return Faults(bits | BAD_SCALE, float(scale[zero][0]))
    return Faults(bits)


def _sizes(parts: Mapping[str, Tensor], scheme: Scheme) -> tuple[Tensor, int]:
    """Return bytes (R, any) in the order of the codes' magnitudes, and the largest of a number.

    Zero is 0. Codes are never decoded, which would take eight times their bytes and many passes.
    """
    import torch

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
    from quantkit.numerics.packed_2to4 import unpack_two_of_four

    match scheme.granularity:
        case PerTensor():
            return sizes.amax() == 0
        case PerChannel():
            return sizes.amax(dim=1) == 0
        case PerGroup(size):
            dense = sizes if meta is None else unpack_two_of_four(sizes, meta)
            return dense.reshape(len(dense), -1, size).amax(dim=2) == 0
