"""The squared error of casting, added in one order on every machine.

Numbers are columns first, (C, ...): what shares a scale lies along the first axis. Terms are
float64, so that those of any float32 neither overflow nor vanish. kernels/host/encode.cpp adds in
the same order: equal sums choose equal scales.
"""

import torch
from torch import Tensor

from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.scales import cast

#: Columns of a block, as the core has them: lanes of its vectors, and columns of a lane.
_LANES, _PLANES = 8, 4


def squared_error(
    columns: Tensor,
    step: Tensor,
    fmt: NumberFormat,
    *,
    value: Tensor | None = None,
    costs: Tensor | None = None,
) -> Tensor:
    """Return the squared error of codes of ``columns / step``, float64 (...).

    Args:
        columns: (C, ...) float32, finite.
        step: (...) float32, what they are divided by.
        value: (...) float64, what a code stands for; None: the step.
        costs: broadcastable against the columns, float64: of the error of each; None: all the same.
    """
    error = cast(columns / step, fmt).double().mul_(step.double() if value is None else value)
    error.sub_(columns).square_()
    if costs is not None:
        error.mul_(costs)
    return add_in_order(error)


def add_in_order(terms: Tensor) -> Tensor:
    """Return the sums along the first axis of (C, ...) float64, which is used up.

    Of 32 columns first those of a lane, then lanes, then blocks: each time halves are added.
    """
    short = -len(terms) % (_LANES * _PLANES)
    if short:
        terms = torch.cat((terms, terms.new_zeros(short, *terms.shape[1:])))
    sums = terms.reshape(-1, _LANES, _PLANES, *terms.shape[1:])
    for dim in (2, 1, 0):
        while (size := sums.shape[dim]) > 1:
            half = (size + 1) // 2
            sums.narrow(dim, 0, size - half).add_(sums.narrow(dim, half, size - half))
            sums = sums.narrow(dim, 0, half)
    return sums[0, 0, 0]
