"""Statistics of the input of every layer, how they were taken, and their file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.fields import (
    LARGEST,
    MOVING,
    TOTAL,
    Statistics,
    StatisticsT,
    Tensors,
    f32,
    f64,
    i64,
    mean_over,
    row,
)
from quantkit.calibration.statistics.sampling import (
    PRIORITIES,
    SAMPLE_COUNT,
    SAMPLE_ROWS,
    SAMPLES,
    count_samples,
    refuse_more_samples,
)
from quantkit.errors import ArtefactError
from quantkit.models.source import Component
from quantkit.numerics.histogram import BINS, quantiles
from quantkit.storage.artefact import pack_name, read_artefact, split_name, write_artefact
from quantkit.storage.jsonfile import as_type, parsing

_KIND = "quantkit_calibration"
#: What the fields of attention modules begin with in the file.
_ATTENTION = "attention."


def _fits_channels(tensors: Tensors) -> str:
    channels, columns = (tensors[name].shape[-1] for name in ("channel_amax", "samples"))
    fits = channels and columns % channels == 0
    return "" if fits else f"{columns} columns do not fit {channels} channels"


def _amax_of(sums: Tensors) -> Tensor:
    return sums["channel_amax"].amax(dim=1)


_OF_VALUES = mean_over("count")


@dataclass(frozen=True, eq=False)
class LayerStatistics(Statistics):
    """The input of one layer over B timestep buckets; C input channels, taps of a conv share.

    R is ``SAMPLE_ROWS``, N is ``BINS``; a convolution's rows are its windows, K = kh * kw * C,
    channels last.
    """

    SIZES: ClassVar = {"N": BINS, "R": SAMPLE_ROWS}

    #: largest |x|
    amax: Tensor = field(metadata=row(f32, "B", LARGEST, derive=_amax_of))
    #: how many |x| fell into each bin of ``histogram``
    histogram: Tensor = field(metadata=row(f64, "BN", TOTAL))
    #: mean of x**2
    second_moment: Tensor = field(metadata=row(f32, "BC", _OF_VALUES))
    #: largest |x|
    channel_amax: Tensor = field(metadata=row(f32, "BC", LARGEST))
    #: values seen per channel
    count: Tensor = field(metadata=row(i64, "B", TOTAL))
    #: exponential moving average of each call's largest |x|
    moving_amax: Tensor = field(metadata=row(f64, "B", MOVING))
    #: the calls it averages
    updates: Tensor = field(metadata=row(i64, "B", TOTAL))
    #: mean of x
    mean: Tensor = field(metadata=row(f32, "BC", _OF_VALUES, signed=True))
    #: rows as the kernels read them, drawn uniformly from all that were seen; by priority, zeros
    #: where fewer were seen
    samples: Tensor = field(
        metadata=row(torch.bfloat16, "BRK", SAMPLES, signed=True, check=_fits_channels)
    )
    #: what each of them was drawn by; those of the largest stay
    sample_priority: Tensor = field(metadata=row(f64, "BR", PRIORITIES))
    #: how many there are, the first ones
    sample_count: Tensor = field(
        metadata=row(i64, "B", SAMPLE_COUNT, derive=count_samples, check=refuse_more_samples)
    )

    def percentile(self, percent: float) -> Tensor:
        """Return the |x| that ``percent`` of all values do not exceed, float64 (B,)."""
        return quantiles(self.histogram, self.amax, percent / 100)


#: Fields by component, module path and name.
Tables = dict[str, dict[str, dict[str, Tensor]]]
#: Statistics by component and module path.
LayersByComponent = dict[str, dict[str, LayerStatistics]]
AttentionByComponent = dict[str, dict[str, AttentionStatistics]]


def per_column(channels: Tensor, area: int) -> Tensor:
    """Return values per channel as values per column of the rows that the kernels read.

    Args:
        channels: (..., C).
        area: taps kh * kw; 1 for a Linear.

    Returns:
        (..., kh * kw * C), the channels of each tap in turn.
    """
    return channels.repeat(*[1] * (channels.ndim - 1), area)


@dataclass(frozen=True)
class CalibrationProvenance:
    """The settings of a run of calibration, and checksums of the weights."""

    #: SHA-256 of each layer's source weight, by component and layer
    digests: dict[str, dict[str, str]]
    #: name of the recipe
    recipe: str
    prompts: int
    #: SHA-256 of the prompts, one a line; of a merge, of its parts' digests, one a line
    prompts_digest: str
    steps: int
    guidance: float | None
    #: of the first prompt's noise; of a merge, the first part's
    seed: int
    #: calls of the denoiser per bucket
    calls: dict[str, list[int]]
    #: of quantkit, torch and diffusers
    versions: dict[str, str]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics of all layers, and how they were taken."""

    layers: LayersByComponent
    #: ascending timesteps between buckets, in the unit the denoiser is called with
    edges: tuple[float, ...]
    metadata: CalibrationProvenance
    #: of every attention module whose processor can be replaced
    attention: AttentionByComponent = field(default_factory=dict)

    def of(self, component: Component) -> Mapping[str, LayerStatistics]:
        """Return the statistics of a component's layers.

        A denoiser that was packed alone finds the statistics taken from its pipeline.

        Raises:
            ArtefactError: the calibration has no such component.
        """
        return self.layers[find_component(component.name, tuple(self.layers), "calibration")]

    def attention_of(self, component: Component) -> Mapping[str, AttentionStatistics]:
        """Return the statistics of a component's attention modules.

        Raises:
            ArtefactError: the calibration has no such component.
        """
        key = find_component(component.name, tuple(self.layers), "calibration")
        return self.attention.get(key, {})

    def unseen_of(self, component: Component) -> frozenset[str]:
        """Return the layers that were listened to, and that no prompt called.

        Raises:
            ArtefactError: the calibration has no such component.
        """
        return frozenset(self.digests_of(component)) - frozenset(self.of(component))

    def digests_of(self, component: Component) -> Mapping[str, str]:
        """Return the SHA-256 of the source weights the statistics belong to."""
        table = self.metadata.digests
        return table[find_component(component.name, tuple(table), "calibration")]


def tell_unseen(unseen: Mapping[str, Sequence[str]]) -> str:
    """Return which layers no prompt called, as a line; empty where there is none.

    Args:
        unseen: names of layers, by component.

    Returns:
        the first three of them and their number.
    """
    names = [f"{component}.{layer}" for component, layers in unseen.items() for layer in layers]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"never called by these prompts: {len(names)} layers, {', '.join(names[:3])}{more}; pack "
        "leaves those in 16 bit that need statistics\n"
    )


def find_component(name: str, stored: tuple[str, ...], what: str) -> str:
    """Return the key of an artefact that a component's name means.

    Raises:
        ArtefactError: none, or more than one could be meant.
    """
    if name in stored:
        return name
    if len(stored) == 1 and "" in (name, *stored):
        return stored[0]
    raise ArtefactError(
        f"{what}: has no component {name or '(alone)'!r}, found {', '.join(map(repr, stored))}; "
        "make it from this model"
    )


def save_calibration(calibration: Calibration, path: Path, *, force: bool) -> None:
    """Write the calibration to one safetensors file.

    Raises:
        OutputError: the file exists without ``force``, or cannot be written.
    """
    tensors = named_tensors(
        *(
            {c: {n: found.tensors() for n, found in table.items()} for c, table in tables.items()}
            for tables in (calibration.layers, calibration.attention)
        )
    )
    about = {"edges": calibration.edges, "bins": BINS, "provenance": asdict(calibration.metadata)}
    write_artefact(path, _KIND, tensors, about, force=force)


def load_calibration(path: Path) -> Calibration:
    """Read what ``save_calibration`` wrote.

    Raises:
        ArtefactError: missing, damaged, or of another version.
    """
    tensors, about = read_artefact(path, _KIND)
    with parsing(path, cure="calibrate again"):
        edges = edges_of(about["edges"])
        buckets = len(edges) + 1
        of_layers, of_attention = tables_of(tensors)
        layers = _checked(LayerStatistics, of_layers, buckets)
        attention = _checked(AttentionStatistics, of_attention, buckets)
        about_run = as_type(CalibrationProvenance, about["provenance"])
        # One that no prompt called has no layers with statistics.
        layers = {name: {} for name in about_run.digests} | layers
        if set(about_run.digests) != set(layers) or set(about_run.calls) != set(layers):
            raise ValueError("components of the statistics and of what is said about them differ")
        if not set(attention) <= set(layers):
            raise ValueError(f"attention of {min(set(attention) - set(layers))}: no layers of it")
        return Calibration(layers, edges, about_run, attention)


def edges_of(values: Any) -> tuple[float, ...]:
    """Return the timestep edges of an artefact.

    Raises:
        TypeError, ValueError: they are not ascending finite numbers.
    """
    edges = tuple(map(float, values))
    if not all(map(isfinite, edges)) or any(a >= b for a, b in pairwise(edges)):
        raise ValueError("edges that are not finite and ascending")
    return edges


def _checked(
    kind: type[StatisticsT], tables: Mapping[str, Mapping[str, Tensors]], buckets: int
) -> dict[str, dict[str, StatisticsT]]:
    """Return the statistics of tensors by component and name.

    Raises:
        ValueError: tensors that are missing, unknown, or of a wrong shape or value.
    """
    return {
        component: {
            name: kind.checked(f"{component}/{name}", tensors, buckets)
            for name, tensors in table.items()
        }
        for component, table in tables.items()
    }


def named_tensors(*tables: Mapping[str, Mapping[str, Tensors]]) -> dict[str, Tensor]:
    """Return the tensors of layers and of attention modules by their names in a file.

    Args:
        tables: of layers and of attention modules: fields by component and name.
    """
    return {
        pack_name(component, name, prefix + field): tensor
        for prefix, table in zip(("", _ATTENTION), tables, strict=True)
        for component, owners in table.items()
        for name, fields in owners.items()
        for field, tensor in fields.items()
    }


def tables_of(tensors: Tensors) -> tuple[Tables, Tables]:
    """Undo ``named_tensors``.

    Raises:
        ValueError: names that it does not give.
    """
    layers: Tables = {}
    attention: Tables = {}
    for packed, tensor in tensors.items():
        component, name, field = split_name(packed)
        table = attention if field.startswith(_ATTENTION) else layers
        owner = table.setdefault(component, {}).setdefault(name, {})
        owner[field.removeprefix(_ATTENTION)] = tensor
    return layers, attention
