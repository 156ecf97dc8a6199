"""The codes and scales of a packed layer in the forms that other programs' files hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoint.component import PackedComponent
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import Granularity
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.packed_2to4 import from_rows, to_rows
from quantkit.numerics.scales import cast, power_of_two, quantize


@dataclass(frozen=True, eq=False)
class LayerCodes:
    """A weight as codes with a scale for each output channel."""

    fmt: NumberFormat
    #: (N, K) or (N, C, kh, kw), float8 or int8
    codes: Tensor
    #: (N,) float32
    scale: Tensor
    #: static; None: inputs have none
    input_scale: float | None = None

    def values(self) -> Tensor:
        """Return code times scale, float32, in the shape of the codes."""
        return self.codes.float() * _along_rows(self.scale, self.codes)

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
    """Return layers joined by rows, with their scales."""
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    return LayerCodes(
        parts[0].fmt,
        codes.view(parts[0].codes.dtype),
        torch.cat([part.scale for part in parts]),
    )


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
