"""Packed layers of one input as one layer: their rows joined, to the bit.

Rows of a weight keep their scales, and the layers' input has one scale in common, so the joined
layer's outputs are those of the layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.numerics.granularity import PerChannel, PerTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from quantkit.numerics.scheme import Scheme

#: Parts of a layer with a row or an entry per output, and those that belong to the input.
OF_OUTPUTS = ("weight", "weight_meta", "weight_group", "weight_scale")
OF_INPUT = ("input_scale", "input_smooth")


def why_separate(schemes: Sequence[Scheme], layers: Sequence[Mapping[str, Tensor]]) -> str:
    """Return why layers of inputs of one size cannot be joined; empty when they can.

    Args:
        schemes: of the layers.
        layers: their parts, as FORMAT.md names them.
    """
    import torch

    if any(scheme != schemes[0] for scheme in schemes):
        return "they have different schemes"
    for part in OF_INPUT:
        found = [layer[part] for layer in layers if part in layer]
        if any(not torch.equal(other, found[0]) for other in found):
            return f"{part} differs, as if they had different inputs"
    return ""


def joined_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme of joined layers: a scale for the tensor becomes one for each row."""
    if isinstance(scheme.granularity, PerTensor):
        return replace(scheme, granularity=PerChannel())
    return scheme


def join_parts(scheme: Scheme, layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the parts of layers joined by rows, in their order.

    Args:
        scheme: of each of them.
        layers: their parts, as FORMAT.md names them; all have the same.
    """
    joined = {part: layers[0][part] for part in OF_INPUT if part in layers[0]}
    for part in OF_OUTPUTS:
        rows = [layer[part] for layer in layers if part in layer]
        if part == "weight_scale" and isinstance(scheme.granularity, PerTensor):
            rows = [
                scale.expand(len(layer["weight"]))
                for scale, layer in zip(rows, layers, strict=True)
            ]
        if rows:
            joined[part] = cat_rows(rows)
    return joined


def swap_row_halves(scheme: Scheme, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts of a layer whose halves of rows change places; see ``joined_scheme``."""
    whole = join_parts(scheme, [layer])
    halves = [
        {part: rows.chunk(2)[half] if part in OF_OUTPUTS else rows for part, rows in whole.items()}
        for half in (1, 0)
    ]
    return join_parts(joined_scheme(scheme), halves)


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return rows of one dtype, one tensor after another along dim 0."""
    import torch

    # torch concatenates no FP8 on some devices.
    dtype = parts[0].dtype
    bits = torch.uint8 if dtype.itemsize == 1 else dtype
    return torch.cat([part.view(bits) for part in parts]).view(dtype)
