"""The running sums of what layers read, on their device, and what they come to.

A call's inputs are added all at once: one by one, launching the additions takes a GPU's host longer
than the denoiser does.

They can be taken out and put back bit by bit, so that a run that was ended goes on as if it had not
been: statistics are rounded, and joined with others they are those of one run up to rounding only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.calibration.statistics.batch_peaks import Sizes, peaks_by_batch
from quantkit.calibration.statistics.input_measure import Measured
from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from quantkit.calibration.statistics.moving_average import one_by_one, step_averages, without_start
from quantkit.calibration.statistics.sampling import Reservoir
from quantkit.numerics.histogram import BINS

#: A layer's sums by name, on the CPU.
LayerSums = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class BucketSums:
    """Views of one bucket's sums."""

    #: float32 (C,)
    amax: Tensor
    #: float64 (2, C)
    sums: Tensor
    #: float64 (BINS,)
    histogram: Tensor


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
        #: of values, and of their squares
        self._sums = zeros(2, channels)
        self._histogram = zeros(BINS)
        #: the moving average of each call's amax, from a start of zero, of all batches but those
        #: that run now
        self._moving = zeros()
        self._updates = [0] * buckets
        #: (buckets, batches), likewise of each batch that runs now; of a lone one: goes on
        self._running = self._moving.unsqueeze(1)
        self._steps = [0] * buckets
        self._count = [0] * buckets
        self.sample = Reservoir(buckets, weight[0].numel(), device)
        parts = (self._channel_amax, self._sums, self._histogram)
        self.parts = [BucketSums(*views) for views in zip(*parts, strict=True)]

    def begin(self, batches: int) -> None:
        """Say how many of the recipe's batches run at once from now on."""
        self._join()
        self._running = self._moving.unsqueeze(1)
        if batches > 1:
            self._running = self._moving.new_zeros(len(self._moving), batches)

    def running(self, bucket: int) -> Tensor:
        """Return the moving averages of the batches that run now, to be stepped in place.

        Returns:
            float64 (batches,): NaN or Inf from the first such input on.
        """
        return self._running[bucket]

    def count(self, bucket: int, seen: Measured) -> None:
        """Count an input that is about to be added."""
        self._count[bucket] += seen.count
        self._updates[bucket] += self._running.shape[1]
        self._steps[bucket] += 1

    def _join(self) -> None:
        """Let the average go on over the batches that ran at once, as if one by one."""
        if self._running.shape[1] > 1:
            self._moving.copy_(one_by_one(self._moving, self._running, self._steps))
            self._running.zero_()
        self._steps = [0] * len(self._steps)

    def taken(self) -> LayerSums:
        """Return the sums so far, as ``put`` and ``statistics_of`` take them."""
        self._join()
        samples, priority = self.sample.sorted()
        return {
            "channel_amax": self._channel_amax.cpu(),
            "values": self._sums[:, 0].cpu(),
            "squares": self._sums[:, 1].cpu(),
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
        self._sums.copy_(torch.stack((sums["values"], sums["squares"]), dim=1))
        self._histogram.copy_(sums["histogram"])
        self._moving.copy_(sums["moving"])
        self._updates, self._count = sums["updates"].tolist(), sums["count"].tolist()
        self.sample.put(sums["samples"], sums["priority"])


def add_inputs(bucket: int, inputs: Sequence[tuple[Accumulators, Measured]], sizes: Sizes) -> None:
    """Add inputs of different layers, without waiting for the device.

    Args:
        bucket: of the timestep.
        inputs: by layer.
        sizes: prompts of the batches that run at once.
    """
    for sums, seen in inputs:
        sums.count(bucket, seen)
    mine, found = [sums.parts[bucket] for sums, _ in inputs], [seen for _, seen in inputs]
    torch._foreach_maximum_([sums.amax for sums in mine], [seen.amax for seen in found])
    torch._foreach_add_([sums.sums for sums in mine], [seen.sums for seen in found])
    torch._foreach_add_([sums.histogram for sums in mine], [seen.histogram for seen in found])
    running = [sums.running(bucket) for sums, _ in inputs]
    step_averages(running, peaks_by_batch(found, sizes))


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
