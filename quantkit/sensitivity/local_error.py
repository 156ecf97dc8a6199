"""Local errors: the output error of each layer under a treatment, on stored inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from quantkit.errors import ArtefactError
from quantkit.models.component_layers import Layer
from quantkit.recipe.schema import LayerSettings
from quantkit.sensitivity.treated_layer import (
    InputCast,
    PrunedWeight,
    column_moments,
    on_device,
    round_input,
    treat_input,
    treat_weight,
)
from quantkit.sensitivity.treatments import TREATMENTS, Treatment, refusal
from quantkit.sparsity.choose import read_blocks


@dataclass(frozen=True, eq=False)
class StoredInputs:
    """The calibration of one layer's input."""

    statistics: LayerStatistics
    #: ascending timesteps between buckets
    edges: tuple[float, ...]

    def rows(self, device: torch.device) -> Iterator[tuple[float, Tensor, float]]:
        """Yield per bucket: a timestep in it, rows (R, K) in float32, and a row's weight.

        A row stands for as many as its bucket saw for each that it kept.
        """
        samples, kept = self.statistics.samples, self.statistics.sample_count
        # Any timestep of the bucket will do: its lower edge is inside.
        starts = (float("-inf"), *self.edges)
        for start, rows, seen, count in zip(
            starts, samples, self.statistics.count.tolist(), kept.tolist(), strict=True
        ):
            if count:
                yield start, rows[:count].to(device).float(), seen / count


@dataclass(frozen=True)
class LocalError:
    """The output error of a layer under one treatment."""

    #: sum |W x - W' x'|^2 / sum |W x|^2 over the stored rows x, without the bias; 0 where the
    #: output is all zero
    error: float
    #: timesteps between its static scales
    edges: tuple[float, ...]


def read_weight(layer: Layer, device: torch.device) -> Tensor:
    """Return the layer's weight as rows (N, K), float32.

    Raises:
        ModelError: a truncated file.
        NonFiniteError: NaN or Inf in it.
    """
    return torch.cat([rows.to(device).float() for rows in read_blocks(layer)])


def local_errors(
    layer: Layer,
    settings: LayerSettings,
    inputs: StoredInputs,
    device: torch.device,
    moments: Moments | None = None,
) -> dict[str, LocalError]:
    """Return the relative output error of every treatment that the layer can have.

    One weight and its treated copy are held at a time.

    Args:
        layer: its weight is read from the file.
        settings: of the recipe: how scales are chosen.
        inputs: of the layer.
        device: where it is computed.
        moments: second moments of its input, on the device; None: no treatment that needs them.
            The stored inputs would not do: fewer rows than columns, and those that errors are
            then measured on.

    Raises:
        ArtefactError: the calibration stored inputs of another length.
        NonFiniteError: NaN or Inf in the weight.
    """
    _refuse_other_rows(layer, inputs.statistics)
    weight = read_weight(layer, device)
    powers = column_moments(inputs.statistics, layer.area).to(device)
    possible = [
        t for t in TREATMENTS if not refusal(t, layer) and (moments is not None or not t.updates)
    ]
    operated = None
    if moments is not None and any(t.updates for t in possible):
        operated = PrunedWeight.of(weight, moments, bias=layer.bias)
    errors: dict[str, LocalError] = {}
    for alike in _by_weight(possible):
        if operated is not None and alike[0].updates:
            treated = operated.packed(alike[0], settings)
        else:
            treated = treat_weight(weight, alike[0], settings, powers)
        for treatment in alike:
            cast = treat_input(treatment, settings.activation, inputs.statistics, inputs.edges)
            error = _error(weight, treated, inputs, on_device(cast, device))
            errors[treatment.name] = LocalError(error, () if cast is None else cast.edges)
    return {treatment.name: errors[treatment.name] for treatment in possible}


def _refuse_other_rows(layer: Layer, statistics: LayerStatistics) -> None:
    if statistics.samples.shape[-1] != layer.k:
        raise ArtefactError(
            f"calibration: {layer.name}: stored inputs have {statistics.samples.shape[-1]} "
            f"columns, expected {layer.k}; calibrate this model"
        )


def _by_weight(treatments: Sequence[Treatment]) -> Iterator[list[Treatment]]:
    """Yield groups of treatments with the same weight, so that it is computed once."""
    groups: dict[tuple[str | None, str | None], list[Treatment]] = {}
    for treatment in treatments:
        name = None if treatment.format is None else treatment.format.name
        groups.setdefault((name, treatment.method), []).append(treatment)
    yield from groups.values()


def _error(weight: Tensor, treated: Tensor, inputs: StoredInputs, cast: InputCast | None) -> float:
    lost = total = 0.0
    for timestep, rows, share in inputs.rows(weight.device):
        read = rows if cast is None else round_input(rows, cast.format, cast.at(timestep))
        expected = rows @ weight.T
        lost += share * float((expected - read @ treated.T).square().sum(dtype=torch.float64))
        total += share * float(expected.square().sum(dtype=torch.float64))
    return lost / total if total else 0.0
