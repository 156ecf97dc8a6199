"""Weights that a program multiplies by rotated inputs: how they are rotated, and their codes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.interchange.joining import join
from quantkit.interchange.layer_codes import LayerCodes, joined_codes, map_rows, nearest_codes
from quantkit.interchange.layout_names import OriginalTensor
from quantkit.interchange.reference import Reference
from quantkit.numerics.codebook_int4 import CodebookGrid, pack_pairs
from quantkit.numerics.formats import INT4, INT8, NumberFormat
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.obs import (
    ROUNDING_DAMPING,
    AnyGrid,
    Grid,
    factorize,
    falling_power,
    settle_rows,
)
from quantkit.numerics.rotation import SIZES, largest_size, rotate, rotate_moment
from quantkit.numerics.scales import cast, scale_of_amax
from quantkit.sparsity.sparsegpt import naming, refuse_non_finite

#: Dampings of the moments that are tried where rows were held out.
_DAMPINGS = (1e-2, 1e-1, 1.0)


def choose_rotation(reference: Reference, parts: Sequence[str]) -> int:
    """Return how many columns of int8 weights are rotated together; 0: none.

    The best on the rows that the second moments held out, of a weight and an input in int8. Without
    such rows the largest group: inputs are unknown, and a channel that is far larger than the
    others takes all steps of an input that is not rotated.

    Args:
        reference: the model.
        parts: names of the weights that the file joins.
    """
    key = tuple(parts)
    if key not in reference.rotations:
        reference.rotations[key] = _chosen(reference, parts)
    return reference.rotations[key]


def rotated_codes(
    read: Callable[[str], Tensor],
    reference: Reference | None,
    original: OriginalTensor,
    fmt: NumberFormat,
    rotation: int,
) -> LayerCodes:
    """Return the codes of a weight in the rotated basis, joined as the file has it.

    By GPTQ where there are second moments, else the nearest ones. Where rows were held out, the
    damping that loses least on them, of which the nearest codes are the limit: an input of few
    kinds, as text of 16 prompts, has moments that say nothing of others.

    Args:
        read: returns a weight by its name, (N, K).
        reference: the 16-bit model, which knows moments; None: only values are known.
        original: the weight.
        fmt: INT8, or INT4 for codes of a table.
        rotation: the columns that are rotated together; 0: none.
    """
    parts = [_codes(read(part).float(), reference, part, fmt, rotation) for part in original.parts]
    joined = joined_codes(parts)
    return map_rows(joined, lambda rows: join(original, [rows])) if original.swapped else joined


def _codes(
    weight: Tensor, reference: Reference | None, part: str, fmt: NumberFormat, rotation: int
) -> LayerCodes:
    rows = rotate(weight, rotation)
    moments = None if reference is None else reference.moments(part)
    rule = "mse" if reference is None else _rule(reference, part)
    plain = nearest_codes(rows, INT8, PerChannel(), rule=rule) if fmt is INT8 else None
    grid: AnyGrid = (
        CodebookGrid.choose(rows) if plain is None else Grid(INT8, plain.scale.unsqueeze(1))
    )
    if moments is None:
        return _coded(rows, grid, rotation)
    with naming(part):
        second = rotate_moment(moments.second, rotation)
        if moments.held is None:
            return _coded(_settled(rows, second, grid, ROUNDING_DAMPING), grid, rotation)
        settled = [rows, *(_settled(rows, second, grid, damping) for damping in _DAMPINGS)]
    tried = [_coded(values, grid, rotation) for values in settled]
    return min(tried, key=partial(_lost, moments.held, weight))


def _lost(held: HeldRows, weight: Tensor, codes: LayerCodes) -> float:
    return held.power(codes.values() - weight, None)


def _coded(rows: Tensor, grid: AnyGrid, rotation: int) -> LayerCodes:
    """Return the nearest codes of rows (N, K), rotated."""
    if isinstance(grid, CodebookGrid):
        packed = pack_pairs(grid.codes(rows))
        return LayerCodes(INT4, packed, grid.channels, groups=grid.groups, rotation=rotation)
    return LayerCodes(INT8, cast(rows / grid.scale, INT8), grid.scale.flatten(), rotation=rotation)


def _rule(reference: Reference, part: str) -> str:
    return reference.recipe.settings(part.removesuffix(".weight")).weight.scale_rule


def _settled(rows: Tensor, moment: Tensor, grid: AnyGrid, damping: float) -> Tensor:
    factor = factorize(moment, damping=damping, order=falling_power(moment))
    values, _ = settle_rows(rows, factor, grid=grid)
    refuse_non_finite(values)
    return values


def _chosen(reference: Reference, parts: Sequence[str]) -> int:
    columns = reference.denoiser.shapes[parts[0]][1]
    sizes = [0, *(size for size in SIZES if columns % size == 0)]
    errors = torch.zeros(len(sizes), dtype=torch.float64)
    for part in parts:
        moments = reference.moments(part)
        if moments is None or moments.held is None:
            return largest_size(columns)
        rows = reference.rows(part)
        errors += torch.tensor([_error(rows, moments.held, size) for size in sizes])
    return sizes[int(errors.argmin())]


def _error(weight: Tensor, held: HeldRows, size: int) -> float:
    """Return the squared error of outputs, weight and input in int8, weighted as the moments."""
    inputs = held.rows.float()
    found = _in_int8(rotate(inputs, size)) @ _in_int8(rotate(weight, size)).t()
    error = (found - inputs @ weight.t()).square_().sum(dim=1, dtype=torch.float64)
    return float(error @ held.weights.double())


def _in_int8(rows: Tensor) -> Tensor:
    scale = scale_of_amax(rows.abs().amax(dim=1, keepdim=True), INT8)
    return cast(rows / scale, INT8).float() * scale
