"""The grid of values that a weight's codes represent."""

from dataclasses import dataclass

from torch import Tensor

from quantkit.numerics.block_scales import choose_block_scales
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.granularity import Granularity
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.nibbles import amax_factors, mse_factors
from quantkit.numerics.scales import cast, expand_scale
from quantkit.numerics.scheme import Scheme


@dataclass(frozen=True, eq=False)
class WeightGrid:
    """Codes of a format times the scales of rows (N, K)."""

    fmt: NumberFormat
    granularity: Granularity
    #: float32, [], [N] or [N, K / G]
    scale: Tensor
    #: int8 (N, K / 32), of formats that have them
    factors: Tensor | None = None

    @classmethod
    def choose(
        cls,
        rows: Tensor,
        scheme: Scheme,
        observer: str,
        *,
        scale: Tensor | None = None,
        power: Tensor | None = None,
    ) -> "WeightGrid":
        """Return the grid of rows (N, K) float32.

        Args:
            rows: zero where nothing is kept.
            scheme: format, granularity and sparsity are read.
            observer: amax or mse.
            scale: of the whole weight, where rows are but a part of it; None chooses.
            power: (K,) what an error of each column costs, where factors are chosen by it.

        Raises:
            ShapeError: K is not a multiple of the group size.
        """
        fmt, granularity = scheme.weight, scheme.granularity
        if fmt.block:
            return cls(fmt, granularity, choose_block_scales(rows, fmt, observer, power))
        if not fmt.subscale_group:
            if scale is None:
                scale = choose_scale(rows, fmt, granularity, observer)
            return cls(fmt, granularity, scale)
        if observer == "amax":
            return cls(fmt, granularity, *amax_factors(rows))
        return cls(fmt, granularity, *mse_factors(rows, power))

    def steps(self, k: int) -> Tensor:
        """Return the scales of codes: float32, broadcastable against (N, K)."""
        wide = expand_scale(self.scale, self.granularity, k)
        return wide if self.factors is None else wide * self._by_column(self.factors, k)

    @staticmethod
    def _by_column(factors: Tensor, k: int) -> Tensor:
        return factors.repeat_interleave(k // factors.shape[1], dim=1)

    def codes(self, rows: Tensor) -> Tensor:
        """Return the nearest codes of rows (N, K), in ``fmt.torch_dtype``."""
        return cast(rows / self.steps(rows.shape[1]), self.fmt)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes (N, K), float32."""
        values = codes.float()
        if self.factors is not None:
            # First the integers, which are exact: what the int8 layer that it is would give.
            values = values * self._by_column(self.factors, codes.shape[1])
        return values * expand_scale(self.scale, self.granularity, codes.shape[1])

    def round(self, rows: Tensor) -> Tensor:
        """Return the nearest values of the grid."""
        return self.values(self.codes(rows))
