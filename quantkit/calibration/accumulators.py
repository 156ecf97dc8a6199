"""The running sums of what one layer reads, on its device, and what they come to.

They can be taken out and put back bit by bit, so that a run that was ended goes on as if it had not
been: statistics are rounded, and joined with others they are those of one run up to rounding only.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quantkit.calibration.input_measure import Measured
from quantkit.calibration.moving_average import step_average, without_start
from quantkit.calibration.sampling import Reservoir
from quantkit.calibration.statistics import LayerStatistics
from quantkit.numerics.histogram import BINS

#: A layer's sums by name, on the CPU.
LayerSums = dict[str, Tensor]


class Accumulators:
    """The accumulators of one layer over all timestep buckets."""

    def __init__(self, module: nn.Module, buckets: int, device: torch.device) -> None:
        """Begin with nothing seen.

        Args:
            module: the layer.
            buckets: how many.
            device: of its inputs.
        """
        weight = module.get_parameter("weight")
        channels = weight.shape[1]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(buckets, *shape, device=device, dtype=torch.float64)

        self._channel_amax = torch.zeros(buckets, channels, device=device)
        self._values, self._squares = zeros(channels), zeros(channels)
        self._histogram = zeros(BINS)
        #: the moving average of each call's amax, from a start of zero
        self._moving = zeros()
        self._updates = [0] * buckets
        self._count = [0] * buckets
        self.sample = Reservoir(buckets, weight[0].numel(), device)

    def add(self, bucket: int, seen: Measured) -> None:
        """Add one input, without waiting for the device."""
        amax = self._channel_amax[bucket]
        torch.maximum(amax, seen.amax, out=amax)
        self._values[bucket] += seen.values
        self._squares[bucket] += seen.squares
        self._histogram[bucket] += seen.histogram
        self._count[bucket] += seen.count
        step_average(self._moving[bucket], seen.largest)
        self._updates[bucket] += 1

    def average(self, bucket: int) -> Tensor:
        """The moving average of a bucket, float64 (): NaN or Inf from the first such input on."""
        return self._moving[bucket]

    def taken(self) -> LayerSums:
        """Return the sums so far, as ``put`` and ``statistics_of`` take them."""
        samples, priority = self.sample.sorted()
        return {
            "channel_amax": self._channel_amax.cpu(),
            "values": self._values.cpu(),
            "squares": self._squares.cpu(),
            "histogram": self._histogram.cpu(),
            "moving": self._moving.cpu(),
            "updates": torch.tensor(self._updates),
            "count": torch.tensor(self._count),
            "samples": samples,
            "priority": priority,
        }

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from sums that were taken from the same layer.

        Raises:
            LookupError, ValueError: they are of another layer.
        """
        now = self.taken()
        for name, tensor in now.items():
            found = sums[name]
            if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{name}: {found.dtype} {tuple(found.shape)!s:.80}")
        self._channel_amax.copy_(sums["channel_amax"])
        self._values.copy_(sums["values"])
        self._squares.copy_(sums["squares"])
        self._histogram.copy_(sums["histogram"])
        self._moving.copy_(sums["moving"])
        self._updates, self._count = sums["updates"].tolist(), sums["count"].tolist()
        self.sample.put(sums["samples"], sums["priority"])


def statistics_of(sums: Mapping[str, Tensor]) -> LayerStatistics:
    """Return what sums that were taken come to."""
    seen = sums["count"].clamp(min=1).unsqueeze(1)
    return LayerStatistics(
        amax=sums["channel_amax"].amax(dim=1),
        histogram=sums["histogram"],
        second_moment=(sums["squares"] / seen).float(),
        channel_amax=sums["channel_amax"],
        count=sums["count"],
        moving_amax=without_start(sums["moving"], sums["updates"]),
        updates=sums["updates"],
        mean=(sums["values"] / seen).float(),
        samples=sums["samples"],
        sample_priority=sums["priority"],
        sample_count=(sums["priority"] > 0).sum(dim=1),
    )
