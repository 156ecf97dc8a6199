"""What calibration stores: statistics of the input of every layer, and how they were taken."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.statistics.attention_statistics import (
    AttentionStatistics,
    check_attention,
)
from quantkit.calibration.statistics.layer_fields import check_statistics
from quantkit.calibration.statistics.merged_buckets import bucket_groups, targets_of
from quantkit.calibration.statistics.sampling import join_samples
from quantkit.errors import ArtefactError
from quantkit.models.source import Component
from quantkit.numerics.histogram import BINS, quantiles
from quantkit.storage.artefact import pack_name, read_artefact, split_name, write_artefact
from quantkit.storage.jsonfile import as_type, parsing

_KIND = "quantkit_calibration"
#: What the fields of attention modules begin with in the file.
_ATTENTION = "attention."


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """The input of one layer over B timestep buckets; C input channels, taps of a conv share.

    R is ``SAMPLE_ROWS``; a convolution's rows are its windows, K = kh * kw * C, channels last.
    """

    #: float32 (B,), largest |x|
    amax: Tensor
    #: float64 (B, BINS), how many |x| fell into each bin of ``histogram``
    histogram: Tensor
    #: float32 (B, C), mean of x**2
    second_moment: Tensor
    #: float32 (B, C), largest |x|
    channel_amax: Tensor
    #: int64 (B,), values seen per channel
    count: Tensor
    #: float64 (B,), exponential moving average of each call's largest |x|
    moving_amax: Tensor
    #: int64 (B,), the calls it averages
    updates: Tensor
    #: float32 (B, C), mean of x
    mean: Tensor
    #: bfloat16 (B, R, K), rows as the kernels read them, drawn uniformly from all that were seen;
    #: by priority, zeros where fewer were seen
    samples: Tensor
    #: float64 (B, R), what each of them was drawn by; those of the largest stay
    sample_priority: Tensor
    #: int64 (B,), how many there are, the first ones
    sample_count: Tensor

    def pooled(self) -> "LayerStatistics":
        """Return the statistics of all buckets as one (B = 1)."""
        return self.regrouped([0] * len(self.amax))

    def regrouped(self, targets: Sequence[int]) -> "LayerStatistics":
        """Return the statistics with bucket b poured into bucket ``targets[b]``.

        All is exact but the moving average, which becomes the mean of those of the buckets, each
        weighing as much as it had calls: one over the whole trajectory would remember its end only.
        """
        groups = bucket_groups(targets)
        weighted = self.second_moment.double() * self.count.unsqueeze(1)
        count = torch.stack([self.count[g].sum() for g in groups])
        moment = torch.stack([weighted[g].sum(dim=0) for g in groups])
        return LayerStatistics(
            amax=torch.stack([self.amax[g].amax() for g in groups]),
            histogram=torch.stack([self.histogram[g].sum(dim=0) for g in groups]),
            second_moment=(moment / count.clamp(min=1).unsqueeze(1)).float(),
            channel_amax=torch.stack([self.channel_amax[g].amax(dim=0) for g in groups]),
            count=count,
            **self._regrouped_average(groups),
            **self._regrouped_samples(groups),
        )

    def _regrouped_average(self, groups: Sequence[Tensor]) -> dict[str, Tensor]:
        weighted = self.moving_amax * self.updates
        updates = torch.stack([self.updates[g].sum() for g in groups])
        total = torch.stack([weighted[g].sum() for g in groups])
        return {"moving_amax": total / updates.clamp(min=1), "updates": updates}

    def _regrouped_samples(self, groups: Sequence[Tensor]) -> dict[str, Tensor]:
        joined = [
            join_samples(
                [(self.samples[b : b + 1], self.sample_priority[b : b + 1]) for b in g.tolist()]
            )
            for g in groups
        ]
        weighted = self.mean.double() * self.count.unsqueeze(1)
        count = torch.stack([self.count[g].sum() for g in groups]).clamp(min=1)
        total = torch.stack([weighted[g].sum(dim=0) for g in groups])
        priority = torch.cat([priority for _, priority in joined])
        return {
            "mean": (total / count.unsqueeze(1)).float(),
            "samples": torch.cat([rows for rows, _ in joined]),
            "sample_priority": priority,
            "sample_count": (priority > 0).sum(dim=1),
        }

    def rebucketed(self, stored: Sequence[float], wanted: Sequence[float]) -> "LayerStatistics":
        """Return the statistics per bucket of ``wanted`` edges, some of the ``stored`` ones."""
        return self.regrouped(targets_of(stored, wanted))

    def percentile(self, percent: float) -> Tensor:
        """Return the |x| that ``percent`` of all values do not exceed, float64 (B,)."""
        return quantiles(self.histogram, self.amax, percent / 100)


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
    """How a calibration was taken."""

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
    #: of every attention module with a known processor
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
    tensors = {
        **_tensors_of(calibration.layers, ""),
        **_tensors_of(calibration.attention, _ATTENTION),
    }
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
        layers, attention = _tables_of(tensors, len(edges) + 1)
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


def _tensors_of(tables: LayersByComponent | AttentionByComponent, prefix: str) -> dict[str, Tensor]:
    """Return every field that is there, by component, layer and field."""
    return {
        pack_name(component, layer, prefix + field.name): tensor
        for component, table in tables.items()
        for layer, statistics in table.items()
        for field in fields(statistics)
        if (tensor := getattr(statistics, field.name)) is not None
    }


def _tables_of(
    tensors: Mapping[str, Tensor], buckets: int
) -> tuple[LayersByComponent, AttentionByComponent]:
    """Undo ``_tensors_of``, for layers and for attention modules.

    Raises:
        LookupError, ValueError: tensors that are missing, unknown, or of a wrong shape or value.
    """
    layers: LayersByComponent = {}
    attention: AttentionByComponent = {}
    for (component, name, of_attention), parts in _grouped(tensors).items():
        where = f"{component}/{name}"
        if of_attention:
            check_attention(where, parts, buckets)
            attention.setdefault(component, {})[name] = AttentionStatistics(**parts)
        else:
            check_statistics(where, parts, buckets)
            layers.setdefault(component, {})[name] = LayerStatistics(**parts)
    return layers, attention


def _grouped(tensors: Mapping[str, Tensor]) -> dict[tuple[str, str, bool], dict[str, Tensor]]:
    """Return fields by component, name, and whether that is an attention module."""
    grouped: dict[tuple[str, str, bool], dict[str, Tensor]] = {}
    for packed, tensor in tensors.items():
        component, name, field = split_name(packed)
        key = (component, name, field.startswith(_ATTENTION))
        grouped.setdefault(key, {})[field.removeprefix(_ATTENTION)] = tensor
    return grouped
