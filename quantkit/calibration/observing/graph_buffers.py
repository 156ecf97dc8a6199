"""Findings of one call of a denoiser, and the buffers of the host that a recorded one reads.

A recorded call launches the same kernels again: which rows are sampled, and where they go, is drawn
on the host, and copied to where its kernels read it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.calibration.observing.attention_accumulators import Attended
from quantkit.calibration.observing.shared_input import MeasuredInput
from quantkit.calibration.statistics.input_measure import Measured
from quantkit.calibration.statistics.sampling import (
    SAMPLE_ROWS,
    Candidates,
    Ranking,
    Reservoir,
    rows_on_device,
)

#: Images that a layer reads, and the rows of each.
RowShape = tuple[int, int]


@dataclass(frozen=True, eq=False)
class CallFindings:
    """Findings of one call that are to be added."""

    #: by layer
    inputs: dict[str, Measured] = field(default_factory=dict)
    #: by attention module
    attended: dict[str, Attended] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Return all of them, in one order."""
        measured = [
            t
            for seen in self.inputs.values()
            for t in (seen.amax, seen.sums, seen.histogram, seen.peaks)
            if t is not None
        ]
        return measured + [t for call in self.attended.values() for t in call.tensors()]

    def clear(self) -> None:
        """Forget them."""
        self.inputs.clear()
        self.attended.clear()


class GraphBuffers:
    """Buffers that a recorded call reads: drawn rows, and the slots where each layer keeps them."""

    def __init__(self, shapes: Mapping[str, RowShape], buckets: int, device: torch.device) -> None:
        """Begin with rows that no layer keeps.

        Args:
            shapes: of what each layer of the call reads.
            buckets: how many the samples have.
            device: of the layers' inputs.
        """
        self.shapes = dict(shapes)
        self.kinds = list(dict.fromkeys(self.shapes.values()))
        self._spare = buckets * SAMPLE_ROWS
        host = self._host()
        self._buffer = torch.from_numpy(host).to(device)
        drawn, kept = self._parts(self._buffer)
        self._drawn = {
            shape: place[:, : _count(shape)] for shape, place in zip(self.kinds, drawn, strict=True)
        }
        self._kept = {
            layer: place[: _count(shape)]
            for (layer, shape), place in zip(self.shapes.items(), kept, strict=True)
        }

    def write(
        self,
        draw: Callable[[RowShape], Candidates],
        admit: Callable[[str, Candidates], Ranking],
        bucket: int,
    ) -> None:
        """Write which rows are read by the next launch, and which of them stay.

        Args:
            draw: returns the rows of inputs of a shape.
            admit: returns who stays of the rows of a layer.
            bucket: that they stay in.
        """
        host = self._host()
        places, kept = self._parts(host)
        drawn = {shape: draw(shape) for shape in self.kinds}
        for place, rows in zip(places, drawn.values(), strict=True):
            place[0, : len(rows.row)], place[1, : len(rows.row)] = rows.image, rows.row
        for place, (layer, shape) in zip(kept, self.shapes.items(), strict=True):
            now = admit(layer, drawn[shape])
            place[now.chosen] = bucket * SAMPLE_ROWS + now.slots
        self._buffer.copy_(torch.from_numpy(host), non_blocking=True)

    def sample(
        self, layer: str, values: Tensor, seen: MeasuredInput, module: nn.Module, sample: Reservoir
    ) -> None:
        """Keep the drawn rows of a layer's input."""
        shape = self.shapes[layer]
        shared = None if isinstance(module, nn.Conv2d) else seen.rows.get(shape)
        if shared is None:
            image, row = self._drawn[shape]
            shared = rows_on_device(values, module, image, row).to(torch.bfloat16)
        if not isinstance(module, nn.Conv2d):
            seen.rows[shape] = shared
        sample.write(shared, self._kept[layer])

    def _host(self) -> NDArray[np.int64]:
        """Return the numbers of a call that keeps no row."""
        count = 2 * len(self.kinds)
        host = np.zeros((count + len(self.shapes), SAMPLE_ROWS), np.int64)
        host[count:] = self._spare
        return host

    def _parts(self, whole: Any) -> tuple[Any, Any]:
        """Return drawn rows, (shapes, 2, rows), and where layers keep them, (layers, rows)."""
        count = 2 * len(self.kinds)
        return whole[:count].reshape(-1, 2, SAMPLE_ROWS), whole[count:]


def _count(shape: RowShape) -> int:
    """Return how many rows are drawn of an input."""
    images, rows = shape
    return min(SAMPLE_ROWS, images * rows)
