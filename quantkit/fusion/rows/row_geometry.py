"""The shares of threads in the rows of a row kernel."""

from collections.abc import Iterable
from dataclasses import dataclass

#: Numbers of a run: 16 bytes of 16-bit ones.
_RUN = 8
_THREADS, _MOST_THREADS = 256, 1024
#: Runs that a lane takes, before a row gets more lanes.
_STEPS = 4


@dataclass(frozen=True)
class RowGeometry:
    """Rows, their columns, and the lanes that compute them."""

    rows: int
    columns: int
    #: columns that a lane takes at once
    run: int
    #: threads of a row
    lanes: int
    #: runs of a lane
    steps: int
    threads: int
    #: one row for all blocks, instead of rows for each
    flat: bool

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        if self.flat:
            return -(-self.columns // (self.threads * self.steps * self.run))
        return -(-self.rows // (self.threads // self.lanes))


def geometry_of(numel: int, columns: int | None, parts: Iterable[int] = ()) -> RowGeometry:
    """Return the geometry of so many numbers.

    Args:
        numel: of all rows.
        columns: of a row; None: nothing is reduced.
        parts: columns of what rows are joined of; no run has columns of two.
    """
    lengths = (numel if columns is None else columns, *parts)
    run = next(n for n in (_RUN, 4, 2, 1) if all(length % n == 0 for length in lengths))
    if columns is None:
        return RowGeometry(1, numel, run, _THREADS, 1, _THREADS, flat=True)
    runs = columns // run
    threads = _THREADS
    while runs > threads * _STEPS and threads < _MOST_THREADS:
        threads *= 2
    lanes = min(1 << (runs - 1).bit_length(), threads)
    steps = -(-runs // lanes)
    return RowGeometry(numel // columns, columns, run, lanes, steps, threads, flat=False)
