"""The codes and scales of a packed layer in the forms that other programs' files hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.joined_parts import cat_rows
from quantkit.numerics.codebook_int4 import table_values
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import Granularity
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.packed_2to4 import from_rows, to_rows
from quantkit.numerics.rotation import rotate
from quantkit.numerics.scales import cast, power_of_two, quantize


@dataclass(frozen=True, eq=False)
class LayerCodes:
    """A weight as codes with a scale for each output channel."""

    fmt: NumberFormat
    #: (N, K) or (N, C, kh, kw), float8 or int8; of INT4 int8 (N, K / 2), places of a table in pairs
    codes: Tensor
    #: (N,) float32
    scale: Tensor
    #: static; None: inputs have none
    input_scale: float | None = None
    #: of INT4: the factors of 16 columns each, e4m3 (N, K / 16)
    groups: Tensor | None = None
    #: columns of the weight that are rotated together; 0: none are
    rotation: int = 0

    def values(self) -> Tensor:
        """Return the weight, float32."""
        codes = self.codes.float() if self.groups is None else table_values(self.codes, self.groups)
        return rotate(codes * _along_rows(self.scale, codes), self.rotation)

    @property
    def one_scale(self) -> float | None:
        """The scale, where all channels have the same one."""
        first = float(self.scale[0])
        return first if bool((self.scale == first).all()) else None


def read_codes(component: PackedComponent, layer: str) -> LayerCodes:
    """Return a packed layer's codes, without smoothing or scales of its input.

    Args:
        component: the packed component.
        layer: whose weight has a scale for the tensor or for each channel.
    """
    record, parts = component.records[layer], component.parts(layer)
    return LayerCodes(
        component.config.layers[layer].weight.byte_format,
        from_rows(component.code_rows(layer), record.shape).contiguous(),
        parts["weight_scale"].expand(record.shape[0]).contiguous(),
    )


def joined_codes(parts: Sequence[LayerCodes]) -> LayerCodes:
    """Return layers joined by rows, with their scales; all of one format and rotation."""
    groups = [part.groups for part in parts if part.groups is not None]
    return LayerCodes(
        parts[0].fmt,
        cat_rows([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        groups=cat_rows(groups) if groups else None,
        rotation=parts[0].rotation,
    )


def map_rows(layer: LayerCodes, move: Callable[[Tensor], Tensor]) -> LayerCodes:
    """Return a layer whose rows are moved, with their scales.

    Args:
        layer: any.
        move: returns the rows of a tensor in another order; it is given bytes, and the scales.
    """

    def moved(codes: Tensor) -> Tensor:
        return move(codes.view(torch.uint8)).view(codes.dtype)

    groups = None if layer.groups is None else moved(layer.groups)
    return replace(layer, codes=moved(layer.codes), scale=move(layer.scale), groups=groups)


def are_powers_of_two(scale: Tensor) -> bool:
    """Tell whether all scales are powers of two."""
    return torch.equal(power_of_two(scale), scale)


def under_one_scale(layer: LayerCodes) -> LayerCodes:
    """Return a layer whose scales are powers of two with the largest of them for all channels.

    The same values, but of codes that become subnormal. A channel of zeros has any scale.
    """
    used = layer.codes.view(torch.uint8).flatten(1).bitwise_and(0x7F).ne(0).any(dim=1)
    scales = layer.scale[used]
    scale = scales.max() if len(scales) else torch.tensor(1.0)
    ratio = torch.where(used, layer.scale / scale, torch.ones(()))
    codes = cast(layer.codes.float() * _along_rows(ratio, layer.codes), layer.fmt)
    return replace(layer, codes=codes, scale=scale.expand(len(layer.scale)).contiguous())


def nearest_codes(
    values: Tensor, fmt: NumberFormat, granularity: Granularity, *, rule: str
) -> LayerCodes:
    """Return a weight's nearest codes.

    Args:
        values: (N, K) or (N, C, kh, kw) float32.
        fmt: what it becomes.
        granularity: per tensor or per channel.
        rule: of ``WEIGHT_SCALES``.
    """
    rows = to_rows(values)
    scale = choose_scale(rows, fmt, granularity, rule)
    codes = from_rows(quantize(rows, scale, fmt, granularity), tuple(values.shape))
    return LayerCodes(fmt, codes.contiguous(), scale.expand(len(rows)).contiguous())


def _along_rows(scale: Tensor, codes: Tensor) -> Tensor:
    return scale.reshape(-1, *[1] * (codes.ndim - 1))
