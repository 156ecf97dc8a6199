"""Inputs that several layers read, as queries, keys and values do, measured once."""

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from quantkit.calibration.statistics.input_measure import Measured, measure


class Remembered:
    """An input as it was when a layer read it, which is not kept from being freed.

    What comes next takes its memory, which is in a near cache then.
    """

    def __init__(self, values: Tensor) -> None:
        """Remember an input."""
        self._values = weakref.ref(values)
        #: one that was written to since then is another input
        self._version = _version(values)

    def is_still(self, values: Tensor) -> bool:
        """Tell whether an input is this one, and has not changed."""
        mine = self._values()
        if mine is None or values.data_ptr() != mine.data_ptr() or values.dtype != mine.dtype:
            return False
        alike = (values.shape, values.stride()) == (mine.shape, mine.stride())
        now = _version(values)
        return alike and now is not None and now == self._version


@dataclass(frozen=True, eq=False)
class MeasuredInput:
    """An input that a layer read, and what was found."""

    input: Remembered
    axis: int
    measured: Measured
    #: rows that were drawn, by the answer that drew them
    rows: dict[object, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Tensor, axis: int, *, peaks: bool = False) -> "MeasuredInput":
        """Measure an input.

        Args:
            values: the input.
            axis: of its channels.
            peaks: of its images are asked for.
        """
        return cls(Remembered(values), axis, measure(values.detach(), axis, peaks=peaks))

    def is_of(self, values: Tensor, axis: int) -> bool:
        """Tell whether an input is this one, and has not changed."""
        return axis == self.axis and self.input.is_still(values)


def _version(values: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count."""
    return None if values.is_inference() else values._version  # noqa: SLF001  torch's only sign
