"""Rules for choosing scales of weights, as data for both the compiled core and PyTorch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum

#: Candidates of the MSE search, as fractions of the amax scale. Clipping deeper than half of amax
#: never won on Gaussian or Laplacian rows, and a code per octave has at most 8 steps to gain.
MSE_GRID = tuple(1.0 - 0.02 * i for i in range(26))


@dataclass(frozen=True)
class ScaleRule:
    """The candidates of a rule; the first with the least squared error is taken."""

    #: of the amax scale, float32
    fractions: tuple[float, ...] = (1.0,)
    #: or of the least power of two that is not below it
    pow2: bool = False


WEIGHT_SCALES = {
    "amax": ScaleRule(),
    "mse": ScaleRule(MSE_GRID),
    "amax_pow2": ScaleRule(pow2=True),
    "mse_pow2": ScaleRule((1.0, 0.5), pow2=True),
}


def first_of_least(errors: Sequence[Iterable[float]]) -> int:
    """Return the index of the least sum, compared exactly: blocks of any size give the same."""
    sums = [fsum(error) for error in errors]
    return sums.index(min(sums))
