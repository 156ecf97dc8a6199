"""What the tensors of a layer's statistics and sums must be, whoever wrote the file."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.numerics.histogram import BINS


@dataclass(frozen=True)
class Field:
    """One tensor."""

    dtype: torch.dtype
    #: a letter each, of a layer: B buckets, C channels, H bins, R rows of the sample, K columns of
    #: a row
    axes: str
    #: it may be below 0
    signed: bool = False


#: Of ``LayerStatistics``.
STATISTICS = {
    "amax": Field(torch.float32, "B"),
    "histogram": Field(torch.float64, "BH"),
    "second_moment": Field(torch.float32, "BC"),
    "channel_amax": Field(torch.float32, "BC"),
    "count": Field(torch.int64, "B"),
    "moving_amax": Field(torch.float64, "B"),
    "updates": Field(torch.int64, "B"),
    "mean": Field(torch.float32, "BC", signed=True),
    "samples": Field(torch.bfloat16, "BRK", signed=True),
    "sample_priority": Field(torch.float64, "BR"),
    "sample_count": Field(torch.int64, "B"),
}
#: Of ``LayerSums``.
SUMS = {
    "channel_amax": Field(torch.float32, "BC"),
    "values": Field(torch.float64, "BC", signed=True),
    "squares": Field(torch.float64, "BC"),
    "histogram": Field(torch.float64, "BH"),
    "moving": Field(torch.float64, "B"),
    "updates": Field(torch.int64, "B"),
    "count": Field(torch.int64, "B"),
    "samples": Field(torch.bfloat16, "BRK", signed=True),
    "priority": Field(torch.float64, "BR"),
}


def check_statistics(where: str, tensors: Mapping[str, Tensor], buckets: int) -> None:
    """Hold the tensors of one layer against ``LayerStatistics``.

    Args:
        where: what messages call the layer.
        tensors: by the name of the field.
        buckets: timestep buckets of the calibration.

    Raises:
        LookupError, ValueError: a field that is missing or unknown, or of a wrong dtype, shape or
            value.
    """
    _check(where, tensors, STATISTICS, buckets)
    if bool((tensors["sample_count"] > SAMPLE_ROWS).any()):
        raise ValueError(f"{where}/sample_count: above {SAMPLE_ROWS}")


def check_sums(where: str, tensors: Mapping[str, Tensor], buckets: int) -> None:
    """Hold the tensors of one layer against ``LayerSums``.

    Raises:
        LookupError, ValueError: as ``check_statistics``.
    """
    _check(where, tensors, SUMS, buckets)


def _check(
    where: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Field], buckets: int
) -> None:
    _refuse_odd(where, tensors, wanted)
    channels = tensors["channel_amax"].shape[-1]
    columns = tensors["samples"].shape[-1]
    if not channels or columns % channels:
        raise ValueError(f"{where}: samples of {columns} columns do not fit {channels} channels")
    sizes = {"B": buckets, "C": channels, "H": BINS, "R": SAMPLE_ROWS, "K": columns}
    check_fields(where, tensors, wanted, sizes)


def check_fields(
    where: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Field], sizes: Mapping[str, int]
) -> None:
    """Hold tensors against fields.

    Args:
        where: what messages call their owner.
        tensors: by the name of the field.
        wanted: the fields, all of them.
        sizes: of the axes, by their letter.

    Raises:
        ValueError: a field that is missing or unknown, or of a wrong dtype, shape or value.
    """
    _refuse_odd(where, tensors, wanted)
    for name, field in wanted.items():
        tensor, shape = tensors[name], tuple(sizes[axis] for axis in field.axes)
        if tensor.dtype != field.dtype:
            raise ValueError(f"{where}/{name}: {tensor.dtype}, wanted {field.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where}/{name}: shape {tuple(tensor.shape)}, wanted {shape}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{where}/{name}: NaN or Inf")
        if not field.signed and bool((tensor < 0).any()):
            raise ValueError(f"{where}/{name}: below 0")


def _refuse_odd(where: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Field]) -> None:
    if odd := set(tensors) ^ set(wanted):
        raise ValueError(f"{where}/{min(odd)}: {'unknown' if min(odd) in tensors else 'missing'}")
