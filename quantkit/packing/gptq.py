"""Rounding a weight's rows to codes so that later columns make up for the error of earlier ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.moments.moment_files import Hessians
from quantkit.errors import NonFiniteError
from quantkit.models.component_layers import Layer
from quantkit.models.source import Component
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.obs import (
    ROUNDING_DAMPING,
    Factor,
    Grid,
    factorize,
    falling_power,
    refit_rows,
    settle_rows,
)
from quantkit.sparsity.sparsegpt import (
    DAMPING,
    REFIT_DAMPING,
    REFIT_STEPS,
    naming,
    refuse_non_finite,
    target_moment,
)


@dataclass(frozen=True)
class Rounder:
    """A reference to a layer's second moments; they are read when its weight is."""

    hessians: Hessians
    component: Component
    layer: Layer
    #: the bias takes up the mean of the error
    centred: bool

    def prepare(self, factor: Tensor | None) -> "Rounding":
        """Read the moments and factor them.

        Args:
            factor: (K,) by which each column's input is multiplied, and its weight divided; None
                without smoothing.

        Raises:
            ArtefactError: no moments, or damaged ones.
            NonFiniteError: smoothing takes them beyond float32.
        """
        moments = self.hessians.read(self.component, self.layer)
        if factor is not None:
            moments = moments.smoothed(factor)
            if not bool(moments.second.isfinite().all()):
                raise NonFiniteError(
                    f"{self.layer.name}: smoothing overflows its second moments; lower smooth"
                )
        with naming(self.layer.name):
            return Rounding.of(target_moment(moments, bias=self.centred))


@dataclass(frozen=True, eq=False)
class Rounding:
    """The second moments of one layer, ready."""

    #: float32 (K, K)
    moment: Tensor
    factor: Factor

    @classmethod
    def of(cls, moment: Tensor) -> "Rounding":
        """Factor a moment (K, K), float32."""
        factor = factorize(moment, damping=ROUNDING_DAMPING, order=falling_power(moment))
        return cls(moment, factor)

    def update(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Return rows (R, K) whose kept weights make up for the dropped ones.

        Raises:
            NonFiniteError: the moments are none of any inputs.
        """
        factor, moment = factorize(self.moment, damping=DAMPING), self.moment
        values, _ = settle_rows(rows, factor, mask=mask)
        values = refit_rows(rows, values, mask, moment, damping=REFIT_DAMPING, steps=REFIT_STEPS)
        refuse_non_finite(values)
        return values

    def round(self, rows: Tensor, mask: Tensor | None, scale: Tensor, fmt: NumberFormat) -> Tensor:
        """Return rows (R, K) of codes times scale.

        Args:
            rows: float32, zero outside the mask.
            mask: bool (R, K); None: dense.
            scale: float32, broadcastable against the rows.
            fmt: of the codes.

        Raises:
            NonFiniteError: the moments are none of any inputs.
        """
        values, _ = settle_rows(rows, self.factor, mask=mask, grid=Grid(fmt, scale))
        refuse_non_finite(values)
        return values

    @property
    def block_elements(self) -> int:
        """The number of weights to round at a time.

        Columns are rounded one by one, so blocks of few rows are slow; one as large as the matrix
        does not change the memory that is needed.
        """
        return int(torch.numel(self.moment))
