"""Formats of codes in .safetensors files: a layer's tensors, and the numbers that they stand for.

Sources: for names and markers comfy/ops.py and comfy/quant_ops.py of ComfyUI 0.33.0, for values
comfy-kitchen 0.2.40.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.numerics.codebook_int4 import unpack_pairs
from quantkit.numerics.rotation import SIZES, rotate


class LayerTensors(Protocol):
    """The tensors of one layer in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, as torch has it."""

    @property
    def told(self) -> Mapping[str, Any]:
        """The marker; empty where there is none."""

    def codes(self, first: int, count: int) -> Tensor:
        """Return elements of the weight's tensor, flat, in their dtype."""

    def part(self, name: str) -> Tensor | None:
        """Return another tensor of the layer; None: it has none."""


#: (first, count) -> numbers of a weight, flat, float32; both in whole blocks
Decode = Callable[[int, int], Tensor]
#: (shape of a weight, its marker) -> the shapes that another tensor of its layer may have
Shapes = Callable[[Sequence[int], Mapping[str, Any]], set[tuple[int, ...]]]

#: Columns of a block.
_NVFP4, _MXFP8 = 16, 32
#: Columns of a group and of a rotation, where a marker does not say.
_GROUP, _ROTATION = 16, 256
#: Source: OCP Microscaling Formats (MX) 1.0, E2M1.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
#: Rows and columns of a tile of scales. Source: cuBLAS, 1D block scaling factors layout.
_TILE = (128, 4)


@dataclass(frozen=True)
class Part:
    """Another tensor of a layer with codes."""

    shapes: Shapes
    #: as headers name them
    dtypes: tuple[str, ...] = ("F32", "F16", "BF16")
    #: it may be missing
    optional: bool = False
    #: its numbers may be negative
    signed: bool = False


@dataclass(frozen=True)
class CodeFormat:
    """One format of codes."""

    #: of the weight's tensor, as headers name them
    dtypes: tuple[str, ...]
    #: reads the layer's other tensors, and returns what decodes its codes
    open: Callable[[LayerTensors], Decode]
    #: the other tensors, by the last part of their names
    parts: Mapping[str, Part]
    #: values in an element of the weight's tensor
    packed: int = 1
    #: columns that are read together
    block: Callable[[Mapping[str, Any]], int] = lambda _: 1
    #: keys of the marker -> their known values
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def _open_scaled(layer: LayerTensors) -> Decode:
    scales, row = _float_part(layer, "weight_scale").reshape(-1), prod(layer.shape[1:])
    rotation = _rotation(layer.told)

    def decode(first: int, count: int) -> Tensor:
        values = layer.codes(first, count).float()
        return rotate(values * _of_rows(scales, first, count, row), rotation)

    return decode


def _open_nvfp4(layer: LayerTensors) -> Decode:
    rows, columns = layer.shape
    scale = layer.part("weight_scale")
    assert scale is not None
    blocks = _untiled(scale.view(torch.float8_e4m3fn).float(), rows, columns // _NVFP4)
    steps = blocks * _float_part(layer, "weight_scale_2").reshape(())
    numbers = torch.cat([_E2M1, -_E2M1])

    def decode(first: int, count: int) -> Tensor:
        # The high half of a byte is the even column.
        pairs = unpack_pairs(layer.codes(first // 2, count // 2)).reshape(-1, 2).flip(1)
        return _by_block(numbers[pairs.long()], steps, first, _NVFP4)

    return decode


def _open_mxfp8(layer: LayerTensors) -> Decode:
    rows, columns = layer.shape
    exponents = layer.part("weight_scale")
    assert exponents is not None
    blocks = _untiled(exponents.view(torch.uint8), rows, columns // _MXFP8)
    # 2^(e - 127); 255 is no number.
    steps = blocks.view(torch.float8_e8m0fnu).float()

    def decode(first: int, count: int) -> Tensor:
        return _by_block(layer.codes(first, count).float(), steps, first, _MXFP8)

    return decode


def _open_w4a8(layer: LayerTensors) -> Decode:
    groups, table = layer.part("weight_s_rel"), layer.part("weight_codebook")
    assert groups is not None
    factors = groups.view(torch.float8_e4m3fn) if groups.dtype is torch.uint8 else groups
    numbers = torch.arange(16.0) - 8 if table is None else table.float()
    channels, row = _float_part(layer, "weight_s_channel"), layer.shape[1]
    size, rotation = _group(layer.told), _rotation_of_w4a8(layer.told)

    def decode(first: int, count: int) -> Tensor:
        codes = unpack_pairs(layer.codes(first // 2, count // 2))
        products = _by_block(numbers[codes.long()], factors.float(), first, size)
        integers = products.round_().clamp_(-127, 127)
        return rotate(integers * _of_rows(channels, first, count, row), rotation)

    return decode


def _float_part(layer: LayerTensors, name: str) -> Tensor:
    found = layer.part(name)
    assert found is not None
    return found.float()


def _of_rows(scales: Tensor, first: int, count: int, row: int) -> Tensor:
    """Return the scale of each of so many numbers: one for all, or one for each row."""
    return scales if len(scales) == 1 else scales[torch.arange(first, first + count) // row]


def _by_block(values: Tensor, steps: Tensor, first: int, block: int) -> Tensor:
    """Return values, from the first on, times the steps of their blocks, flat."""
    blocks = values.reshape(-1, block)
    start = first // block
    return (blocks * steps.reshape(-1)[start : start + len(blocks)].unsqueeze(1)).reshape(-1)


def _untiled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales (rows, columns) from tiles, in which four runs of 32 rows lie side by side."""
    high, wide = _tiled(rows, columns)
    tiles = scale.reshape(high // _TILE[0], wide // _TILE[1], 32, _TILE[0] // 32, _TILE[1])
    return tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)[:rows, :columns].contiguous()


def _tiled(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // _TILE[0]) * _TILE[0], -(-columns // _TILE[1]) * _TILE[1]


def _rotation(told: Mapping[str, Any]) -> int:
    size: int = told.get("convrot_groupsize", _ROTATION)
    return size if told.get("convrot", False) else 0


def _rotation_of_w4a8(told: Mapping[str, Any]) -> int:
    size: int = told.get("convrot_groupsize", _ROTATION)
    return size


def _group(told: Mapping[str, Any]) -> int:
    size: int = told.get("group_size", _GROUP)
    return size


def _one_or_rows(shape: Sequence[int], told: Mapping[str, Any]) -> set[tuple[int, ...]]:
    del told
    rows, ones = shape[0], (1,) * (len(shape) - 1)
    return {(), (1,), (1, 1), (rows,), (rows, 1), (rows, *ones)}


def _tiles(block: int, dtype: str) -> Part:
    # Files from before torch had the types have bytes.
    return Part(lambda shape, _: {_tiled(shape[0], shape[1] // block)}, (dtype, "U8"))


_MARKER = {"full_precision_matrix_mult": (True, False)}
_SCALED = {"weight_scale": Part(_one_or_rows)}
_ROTATED = {"convrot_groupsize": SIZES}
#: Codes that are numbers even without a scale.
FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: Scaled FP8 without a marker.
UNMARKED = CodeFormat(FLOAT8, _open_scaled, _SCALED)

#: ComfyUI's formats that are read, by the word in the marker.
FORMATS: Mapping[str, CodeFormat] = {
    "float8_e4m3fn": CodeFormat(("F8_E4M3",), _open_scaled, _SCALED, keys=_MARKER),
    "float8_e5m2": CodeFormat(("F8_E5M2",), _open_scaled, _SCALED, keys=_MARKER),
    "int8_tensorwise": CodeFormat(
        ("I8",), _open_scaled, _SCALED,
        block=lambda told: _rotation(told) or 1,
        keys={**_MARKER, **_ROTATED, "convrot": (True, False)},
    ),
    "asym_w4a8_int8": CodeFormat(
        ("I8",), _open_w4a8,
        {
            "weight_s_rel": Part(
                lambda shape, told: {(shape[0], shape[1] // _group(told))},
                ("F8_E4M3", "U8", "F32"),
            ),
            "weight_s_channel": Part(lambda shape, _: {(shape[0],)}),
            "weight_codebook": Part(lambda *_: {(16,)}, optional=True, signed=True),
        },
        packed=2,
        block=lambda told: max(_group(told), _rotation_of_w4a8(told)),
        keys={**_MARKER, **_ROTATED, "group_size": (4, 8, 16, 32, 64, 128)},
    ),
    "nvfp4": CodeFormat(
        ("U8",), _open_nvfp4,
        {
            "weight_scale": _tiles(_NVFP4, "F8_E4M3"),
            "weight_scale_2": Part(lambda *_: {(), (1,)}),
        },
        packed=2,
        block=lambda _: _NVFP4,
        keys=_MARKER,
    ),
    "mxfp8": CodeFormat(
        ("F8_E4M3",), _open_mxfp8, {"weight_scale": _tiles(_MXFP8, "F8_E8M0")},
        block=lambda _: _MXFP8,
        keys=_MARKER,
    ),
}  # fmt: skip
