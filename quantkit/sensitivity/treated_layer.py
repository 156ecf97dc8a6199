"""A layer under a treatment in plain PyTorch, with the codes and scales of pack.

Products are taken of dequantized values in float32, which is what ``device.reference`` computes but
for the order of roundings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.statistics.layer_statistics import LayerStatistics, per_column
from quantkit.calibration.statistics.observers import HEADROOM, agreeing_edges, static_scale
from quantkit.models.layer_plan import choose_edges
from quantkit.models.timestep import bucket_of
from quantkit.numerics.formats import NumberFormat
from quantkit.numerics.masks import MASKS, TWO_OF_FOUR, choose_mask
from quantkit.numerics.scales import cast, scale_of_amax
from quantkit.numerics.scheme import Activation
from quantkit.numerics.threads import surgery_threads
from quantkit.numerics.weight_grid import WeightGrid
from quantkit.packing.gptq import Rounding
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.recipe.schema import LayerSettings
from quantkit.sensitivity.treatments import Treatment, activation_recipe, scheme_of
from quantkit.sparsity.sparsegpt import prune_layer


@dataclass(frozen=True, eq=False)
class InputCast:
    """The quantization of a layer's input."""

    format: NumberFormat
    #: float32 (buckets,), static; None: per row, found at run time
    scale: Tensor | None
    #: ascending timesteps between the scales
    edges: tuple[float, ...] = ()

    def at(self, timestep: float) -> Tensor | None:
        """Return the static scale, shape [], of a timestep; None: per row."""
        return None if self.scale is None else self.scale[bucket_of(timestep, self.edges)]


def round_input(values: Tensor, fmt: NumberFormat, scale: Tensor | None, axis: int = -1) -> Tensor:
    """Return values quantized and dequantized, float32.

    Args:
        values: any shape, float32.
        fmt: of the codes.
        scale: of all values, shape []; None: from the amax along ``axis``, 1.0 where that is zero.
        axis: along which values share a scale.
    """
    if scale is None:
        scale = scale_of_amax(values.abs().amax(dim=axis, keepdim=True), fmt)
    return cast(values / scale, fmt).float() * scale


def treat_weight(
    rows: Tensor, treatment: Treatment, settings: LayerSettings, second_moment: Tensor | None
) -> Tensor:
    """Return the weight under a treatment, masked and rounded.

    Args:
        rows: (N, K) float32.
        treatment: its format and mask method, of MASKS.
        settings: granularity and observer of the scales.
        second_moment: (K,) E[x^2] of each column, for the mask.

    Returns:
        (N, K) float32.
    """
    if treatment.method is not None:
        rows = rows * choose_mask(MASKS[treatment.method](rows, second_moment), TWO_OF_FOUR)
    scheme = scheme_of(treatment, settings.weight, ())
    if scheme is None:
        return rows
    return WeightGrid.choose(rows, scheme, settings.weight.scale_rule).round(rows)


@dataclass(frozen=True, eq=False)
class PrunedWeight:
    """A weight that SparseGPT pruned and updated, and its rounding."""

    #: float32 (N, K), zero where nothing is kept
    rows: Tensor
    #: bool (N, K)
    mask: Tensor
    rounding: Rounding

    @classmethod
    def of(cls, rows: Tensor, moments: Moments, *, bias: bool) -> "PrunedWeight":
        """Choose a mask as sparsify does, and update the kept weights as pack does.

        Args:
            rows: (N, K) float32.
            moments: of the layer's input, on the same device.
            bias: the layer has one, which the choice of the mask counts on. The update does not:
                errors are those of packing without bias correction.
        """
        with surgery_threads(rows.shape[1]):
            settled = prune_layer(rows, moments, TWO_OF_FOUR, bias=bias)
            rounding = Rounding(moments, centred=False)
            values = rounding.update(rows, settled.mask) if bias else settled.rows
        return cls(values, settled.mask, rounding)

    def packed(self, treatment: Treatment, settings: LayerSettings) -> Tensor:
        """Return the weight (N, K) under a treatment, as ``treat_weight`` does."""
        scheme = scheme_of(treatment, settings.weight, ())
        if scheme is None:
            return self.rows
        steps = WeightGrid.choose(self.rows, scheme, settings.weight.scale_rule).steps(
            self.rows.shape[1]
        )
        with surgery_threads(self.rows.shape[1]):
            return self.rounding.round(self.rows, self.mask, steps, scheme.weight)


def treat_input(
    treatment: Treatment,
    base: ActivationRecipe,
    statistics: LayerStatistics,
    edges: Sequence[float],
) -> InputCast | None:
    """Return a treatment's quantization of inputs; None: none.

    Args:
        treatment: static scales are chosen for its format.
        base: observer, percentile and buckets of static scales.
        statistics: of the layer's input.
        edges: of the calibration.
    """
    fmt = treatment.input
    if fmt is None:
        return None
    if treatment.activation is Activation.TOKEN:
        return InputCast(fmt, None)
    activation = activation_recipe(treatment, base, len(edges) + 1)
    if activation.buckets == "auto":
        agreed = agreeing_edges(statistics, activation, fmt, edges)
        activation = activation.model_copy(update={"buckets": agreed or 1})
    chosen = choose_edges(activation, tuple(edges))
    scale = static_scale(statistics, activation, fmt, edges=edges, headroom=HEADROOM)
    return InputCast(fmt, scale.reshape(-1), chosen)


def column_moments(statistics: LayerStatistics, area: int) -> Tensor:
    """Return E[x^2] of each column of the layer's rows over all buckets, float32 (K,)."""
    return per_column(statistics.pooled().second_moment[0], area)


def on_device(cast_: InputCast | None, device: torch.device) -> InputCast | None:
    """Return the same cast with its scales on a device."""
    if cast_ is None or cast_.scale is None:
        return cast_
    return InputCast(cast_.format, cast_.scale.to(device), cast_.edges)
