"""What several layers share that read the same input, as queries, keys and values do."""

from dataclasses import dataclass, field

from torch import Tensor

from quantkit.calibration.input_measure import Measured, measure


@dataclass(frozen=True, eq=False)
class Seen:
    """An input as it was when a layer read it."""

    #: detached
    values: Tensor
    axis: int
    #: of the tensor: one that was written to since then is another input
    version: int | None
    measured: Measured
    #: rows that were drawn, by the answer that drew them
    rows: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Tensor, axis: int) -> "Seen":
        """Measure an input, whose channels stand at ``axis``."""
        return cls(values, axis, _version(values), measure(values, axis))

    def is_of(self, values: Tensor, axis: int) -> bool:
        """Tell whether an input is this one, and has not changed."""
        mine = self.values
        same = values.data_ptr() == mine.data_ptr() and values.dtype == mine.dtype
        alike = (values.shape, values.stride(), axis) == (mine.shape, mine.stride(), self.axis)
        version = _version(values)
        return same and alike and version is not None and version == self.version


def _version(values: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count."""
    return None if values.is_inference() else values._version  # noqa: SLF001  torch's only sign
