"""Weights in SDNQ's formats: a layer's tensors, and the numbers that they stand for.

codes * scale + zero_point + svd_up @ svd_down, the products in float32. Source: sdnq 0.2.8.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from quantkit.interchange.code_formats import FLOAT8
from quantkit.interchange.gguf_file import PLAIN
from quantkit.storage.tensorfile import TensorInfo

#: The other tensors of a layer, by the last part of their names.
PARTS = ("scale", "zero_point", "svd_up", "svd_down")
#: Codes that lie in bytes: bits of a code -> for each code of a run, where its bits are: (byte of
#: the run, first bit in that byte, number of bits, first bit in the code).
FIELDS: Mapping[int, tuple[tuple[tuple[int, int, int, int], ...], ...]] = {
    2: (((0, 0, 2, 0),), ((0, 2, 2, 0),), ((0, 4, 2, 0),), ((0, 6, 2, 0),)),
    3: (
        ((0, 0, 3, 0),), ((1, 0, 3, 0),), ((2, 0, 3, 0),),
        ((0, 3, 3, 0),), ((1, 3, 3, 0),), ((2, 3, 3, 0),),
        ((0, 6, 2, 0), (2, 6, 1, 2)), ((1, 6, 2, 0), (2, 7, 1, 2)),
    ),
    4: (((0, 0, 4, 0),), ((0, 4, 4, 0),)),
    5: (
        ((0, 0, 5, 0),), ((1, 0, 5, 0),), ((2, 0, 5, 0),), ((3, 0, 5, 0),), ((4, 0, 5, 0),),
        ((0, 5, 3, 0), (3, 5, 2, 3)), ((1, 5, 3, 0), (4, 5, 2, 3)),
        ((2, 5, 3, 0), (4, 7, 1, 3), (3, 7, 1, 4)),
    ),
    6: (
        ((0, 0, 6, 0),), ((1, 0, 6, 0),), ((2, 0, 6, 0),),
        ((2, 6, 2, 0), (1, 6, 2, 2), (0, 6, 2, 4)),
    ),
    7: (
        *(((byte, 0, 7, 0),) for byte in range(7)),
        tuple((byte, 7, 1, 6 - byte) for byte in range(7)),
    ),
    8: (((0, 0, 8, 0),),),
}  # fmt: skip


def problem_of(shape: Sequence[int], infos: Mapping[str, TensorInfo]) -> str:
    """Return why a layer cannot be read; empty when it can.

    Args:
        shape: of its weight in the model.
        infos: its tensors, "weight" and of ``PARTS``.
    """
    weight, scale = infos["weight"], infos.get("scale")
    if weight.dtype not in ("I8", "U8", *FLOAT8):
        return f"codes in {weight.dtype}, expected I8, U8 or {' or '.join(FLOAT8)}"
    if scale is None:
        return f"{weight.dtype} without a scale, expected {weight.name.rpartition('.')[0]}.scale"
    for part, info in infos.items():
        if part != "weight" and info.dtype not in PLAIN:
            return f"its {part} is in {info.dtype}, expected {', '.join(PLAIN)}"
    return _misshapen(shape, infos) or _unsigned_misfit(shape, infos)


def _misshapen(shape: Sequence[int], infos: Mapping[str, TensorInfo]) -> str:
    """Return which tensor does not fit the weight."""
    scale = infos["scale"].shape
    codes = _shape_of_codes(shape, scale)
    if len(shape) < 2 or prod(codes) != prod(shape) or not _fits(scale, codes):
        return f"shape {list(shape)}, its scale {list(scale)}, expected one for rows or for groups"
    if "zero_point" in infos and infos["zero_point"].shape != scale:
        return (
            f"its zero_point has shape {list(infos['zero_point'].shape)}, its scale {list(scale)}"
        )
    if "svd_up" not in infos and "svd_down" not in infos:
        return ""
    up, down = (infos[part].shape if part in infos else () for part in ("svd_up", "svd_down"))
    columns = prod(shape[1:])
    if len(up) != 2 or up[0] != shape[0] or down != (up[1], columns):
        return (
            f"its svd_up and svd_down have shapes {list(up)} and {list(down)}, expected "
            f"[{shape[0]}, rank] and [rank, {columns}]"
        )
    return ""


def _unsigned_misfit(shape: Sequence[int], infos: Mapping[str, TensorInfo]) -> str:
    """Return what is wrong with the number of codes, or with their sign."""
    weight, numbers = infos["weight"], prod(shape)
    bits = 8 * prod(weight.shape) / max(numbers, 1)
    known = FIELDS if weight.dtype == "U8" else (8,)
    if bits not in known or numbers % len(FIELDS[int(bits)]):
        return f"{bits:g} bits a number in {weight.dtype}, expected {', '.join(map(str, known))}"
    if weight.dtype == "U8" and bits == 8 and "zero_point" not in infos:
        return "U8 without a zero_point, expected both"
    if weight.dtype != "U8" and "zero_point" in infos:
        return f"{weight.dtype} with a zero_point, expected U8"
    if _is_turned(shape, infos["scale"].shape) and weight.shape != (prod(shape[1:]), shape[0]):
        return (
            f"codes of shape {list(weight.shape)}, expected [{prod(shape[1:])}, {shape[0]}] with a "
            f"scale of shape {list(infos['scale'].shape)}"
        )
    return ""


def dequantized(shape: Sequence[int], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a weight in float32.

    Args:
        shape: of the weight in the model.
        tensors: of the layer, without a problem.
    """
    scale, zero = tensors["scale"].float(), tensors.get("zero_point")
    codes = _codes(tensors["weight"], prod(shape), signed=zero is None)
    codes = codes.reshape(_shape_of_codes(shape, scale.shape))
    values = codes * scale if zero is None else torch.addcmul(zero.float(), codes, scale)
    if _is_turned(shape, scale.shape):
        values = values.t()
    values = values.reshape(*shape)
    if "svd_up" in tensors:
        product = tensors["svd_up"].float() @ tensors["svd_down"].float()
        values = values + product.reshape(*shape)
    return values


def _codes(weight: Tensor, numbers: int, *, signed: bool) -> Tensor:
    """Return codes as float32, flat."""
    if weight.dtype is not torch.uint8:
        return weight.float().flatten()
    bits = 8 * weight.numel() // numbers
    codes = unpack(weight, bits).float()
    return codes - 2 ** (bits - 1) if signed else codes


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return codes from bytes: uint8, flat."""
    fields = FIELDS[bits]
    runs = packed.reshape(-1, len(fields) * bits // 8)
    codes = torch.zeros(len(runs), len(fields), dtype=torch.uint8)
    for code, places in enumerate(fields):
        for byte, first, count, target in places:
            codes[:, code] |= (runs[:, byte] >> first & (1 << count) - 1) << target
    return codes.flatten()


def _is_turned(shape: Sequence[int], scale: Sequence[int]) -> bool:
    """Tell whether the codes lie as columns of rows, as SDNQ's own products take them."""
    return len(scale) == 2 and tuple(scale) == (1, shape[0]) and shape[0] > 1


def _shape_of_codes(shape: Sequence[int], scale: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in which the codes meet their scales; groups are along the second axis."""
    if _is_turned(shape, scale):
        return (prod(shape[1:]), shape[0])
    if len(scale) != len(shape) + 1:
        return tuple(shape)
    groups = max(scale[1], 1)
    return (shape[0], groups, shape[1] // groups, *shape[2:])


def _fits(scale: Sequence[int], codes: Sequence[int]) -> bool:
    sizes: Any = zip(scale, codes, strict=False)
    return len(scale) == len(codes) and all(one in (1, size) for one, size in sizes)
