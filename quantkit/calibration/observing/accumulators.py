"""Running sums over the inputs of layers, on their device.

A call's inputs are added all at once: one by one, launching the additions takes a GPU's host longer
than the denoiser does.

They can be taken out and put back bit by bit, so that a run that was ended goes on as if it had not
been: statistics are rounded, and joined with others they are those of one run up to rounding only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.calibration.statistics.batch_peaks import Sizes, peaks_by_batch
from quantkit.calibration.statistics.fields import Tensors, put, refuse_other_shapes, take
from quantkit.calibration.statistics.input_measure import Measured
from quantkit.calibration.statistics.moving_average import one_by_one, step_averages
from quantkit.calibration.statistics.sampling import Reservoir
from quantkit.numerics.histogram import BINS


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
        #: by field
        self._stored = {
            "channel_amax": self._channel_amax,
            "mean": self._sums[:, 0],
            "second_moment": self._sums[:, 1],
            "histogram": self._histogram,
            "moving_amax": self._moving,
        }
        self._counts = {"count": [0] * buckets, "updates": [0] * buckets}
        #: (buckets, batches), the moving average of each batch that runs now; a lone one's goes on
        self._running = self._moving.unsqueeze(1)
        self._steps = [0] * buckets
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
        self._counts["count"][bucket] += seen.count
        self._counts["updates"][bucket] += self._running.shape[1]
        self._steps[bucket] += 1

    def _join(self) -> None:
        """Let the average go on over the batches that ran at once, as if one by one."""
        if self._running.shape[1] > 1:
            self._moving.copy_(one_by_one(self._moving, self._running, self._steps))
            self._running.zero_()
        self._steps = [0] * len(self._steps)

    def taken(self) -> dict[str, Tensor]:
        """Return the sums so far by field, on the CPU."""
        self._join()
        samples, priority = self.sample.sorted()
        taken = take(self._stored, self._counts)
        return {**taken, "samples": samples, "sample_priority": priority}

    def put(self, sums: Tensors) -> None:
        """Go on from sums that were taken from the same layer.

        Raises:
            ValueError: they are of another layer.
        """
        refuse_other_shapes(sums, self.taken())
        put(sums, self._stored, self._counts)
        self.sample.put(sums["samples"], sums["sample_priority"])


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
