"""What the tensors of a layer's statistics must be, whoever wrote the file."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.calibration.histogram import BINS
from quantkit.calibration.sampling import SAMPLE_ROWS

#: Fields that came with version 2, and with version 3: all of a version, or none.
AVERAGE = ("moving_amax", "updates")
SAMPLES = ("mean", "samples", "sample_priority", "sample_count")

_DTYPES = {
    "amax": torch.float32,
    "histogram": torch.float64,
    "second_moment": torch.float32,
    "channel_amax": torch.float32,
    "count": torch.int64,
    "moving_amax": torch.float64,
    "updates": torch.int64,
    "mean": torch.float32,
    "samples": torch.bfloat16,
    "sample_priority": torch.float64,
    "sample_count": torch.int64,
}
_SIGNED = ("mean", "samples")


def check_fields(where: str, fields: Mapping[str, Tensor], buckets: int) -> None:
    """Hold the tensors of one layer against ``LayerStatistics``.

    Args:
        where: what messages call the layer.
        fields: by name.
        buckets: timestep buckets of the calibration.

    Raises:
        LookupError, ValueError: a field that is missing or unknown, or of a wrong dtype, shape or
            value.
    """
    wanted = _shapes(fields, buckets)
    if odd := set(fields) ^ set(wanted):
        raise ValueError(f"{where}/{min(odd)}: {'unknown' if min(odd) in fields else 'missing'}")
    for name, shape in wanted.items():
        tensor = fields[name]
        if tensor.dtype != _DTYPES[name]:
            raise ValueError(f"{where}/{name}: {tensor.dtype}, wanted {_DTYPES[name]}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where}/{name}: shape {tuple(tensor.shape)}, wanted {shape}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{where}/{name}: NaN or Inf")
        if name not in _SIGNED and bool((tensor < 0).any()):
            raise ValueError(f"{where}/{name}: below 0")
    if SAMPLES[0] in fields and bool((fields["sample_count"] > SAMPLE_ROWS).any()):
        raise ValueError(f"{where}/sample_count: above {SAMPLE_ROWS}")


def _shapes(fields: Mapping[str, Tensor], buckets: int) -> dict[str, tuple[int, ...]]:
    channels = fields["channel_amax"].shape[-1]
    shapes: dict[str, tuple[int, ...]] = {
        "amax": (buckets,),
        "histogram": (buckets, BINS),
        "second_moment": (buckets, channels),
        "channel_amax": (buckets, channels),
        "count": (buckets,),
    }
    if set(AVERAGE) & set(fields):
        shapes |= dict.fromkeys(AVERAGE, (buckets,))
    if set(SAMPLES) & set(fields):
        columns = fields["samples"].shape[-1]
        if not channels or columns % channels:
            raise ValueError(f"samples of {columns} columns do not fit {channels} channels")
        shapes |= {
            "mean": (buckets, channels),
            "samples": (buckets, SAMPLE_ROWS, columns),
            "sample_priority": (buckets, SAMPLE_ROWS),
            "sample_count": (buckets,),
        }
    return shapes
