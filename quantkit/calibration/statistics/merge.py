"""Merging of calibrations of one model: the result is that of one run over all prompts."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.calibration.statistics.fields import StatisticsT
from quantkit.calibration.statistics.layer_statistics import (
    AttentionByComponent,
    Calibration,
    CalibrationProvenance,
    LayersByComponent,
)
from quantkit.errors import ArtefactError


def merge(parts: Mapping[str, Calibration]) -> Calibration:
    """Return the calibration over the prompts of all parts, in their order.

    Sums, maxima and counts are those of one run up to float summation; so is the moving average,
    if each part began where a batch did. What a part does not have, the result has not.

    Args:
        parts: at least one, by the name that messages call it.

    Raises:
        ArtefactError: parts of other models, components, layers, edges, steps or guidance, or the
            same run twice.
    """
    (name, first), *rest = parts.items()
    for other, part in rest:
        _refuse_others(name, first, other, part)
    _refuse_repeated(parts)
    layers = _merged([part.layers for part in parts.values()])
    tables = [part.attention for part in parts.values()]
    attention = _merged(tables) if all(tables) else {}
    about = _provenance([part.metadata for part in parts.values()])
    return Calibration(layers, first.edges, about, attention)


@dataclass(frozen=True, eq=False)
class Part:
    """Statistics of some of a run's batches, one after another."""

    layers: LayersByComponent
    attention: AttentionByComponent
    edges: tuple[float, ...]
    #: calls of the denoiser per bucket
    calls: dict[str, list[int]]
    batches: int


def join_parts(parts: Sequence[Part]) -> Part:
    """Return parts of one run, at least one, in the order of their batches, as one part."""
    return Part(
        _merged([part.layers for part in parts]),
        _merged([part.attention for part in parts]),
        parts[0].edges,
        _summed_calls([part.calls for part in parts]),
        sum(part.batches for part in parts),
    )


def _merged(
    tables: Sequence[Mapping[str, Mapping[str, StatisticsT]]],
) -> dict[str, dict[str, StatisticsT]]:
    """Return what any part saw: one may have called no layer of a kind, or with masks only."""
    merged: dict[str, dict[str, StatisticsT]] = {}
    for table in tables:
        for component, found in table.items():
            mine = merged.setdefault(component, {})
            for name, later in found.items():
                mine[name] = mine[name].followed_by(later) if name in mine else later
    return merged


def _summed_calls(tables: Sequence[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    return {
        name: [sum(counts) for counts in zip(*(table[name] for table in tables), strict=True)]
        for name in tables[0]
    }


def _refuse_others(name: str, first: Calibration, other: str, part: Calibration) -> None:
    """Refuse to merge what would mean nothing together."""
    for what, expected, found in _facts(first, part):
        if found != expected:
            raise ArtefactError(
                f"{other}: {what} {found}, expected {expected} as in {name}; merge calibrations of "
                "one model with the same settings"
            )
    for component, layers in first.metadata.digests.items():
        if missing := set(layers) ^ set(part.metadata.digests[component]):
            layer = min(missing)
            here, there = (name, other) if layer in layers else (other, name)
            raise ArtefactError(
                f"{there}: no layer {component}/{layer}, which {here} has; "
                "run 'quantkit calibrate model' again for one of them"
            )
        _refuse_other_heads(name, first, other, part, component)
        one, two = (p.metadata.digests[component] for p in (first, part))
        if changed := [layer for layer in layers if one[layer] != two[layer]]:
            raise ArtefactError(
                f"{other}: the weight of {component}/{changed[0]} is not that of {name}; "
                "merge calibrations of one model"
            )


def _refuse_other_heads(
    name: str, first: Calibration, other: str, part: Calibration, component: str
) -> None:
    one, two = (p.attention.get(component, {}) for p in (first, part))
    for module in one.keys() & two.keys():
        expected, found = ((s.heads, s.columns) for s in (one[module], two[module]))
        if found != expected:
            raise ArtefactError(
                f"{other}: {component}/{module} has heads of {found}, expected {expected} as in "
                f"{name}; merge calibrations of one model"
            )


def _facts(first: Calibration, part: Calibration) -> list[tuple[str, object, object]]:
    """Return what has to agree: its name, the first's and the other's value."""
    one, two = first.metadata, part.metadata
    return [
        ("components", ", ".join(sorted(first.layers)), ", ".join(sorted(part.layers))),
        ("bucket edges", _listed(first.edges), _listed(part.edges)),
        ("steps", one.steps, two.steps),
        ("guidance", one.guidance, two.guidance),
    ]


def _listed(edges: Sequence[float]) -> str:
    return ", ".join(map(repr, edges)) or "(none)"


def _refuse_repeated(parts: Mapping[str, Calibration]) -> None:
    """Refuse one run under two names: its values would count twice."""
    seen: dict[tuple[str, int], str] = {}
    for name, part in parts.items():
        run = (part.metadata.prompts_digest, part.metadata.seed)
        if run in seen:
            raise ArtefactError(
                f"{name}: the same prompts and seed as {seen[run]}; give each run once"
            )
        seen[run] = name


def _provenance(parts: Sequence[CalibrationProvenance]) -> CalibrationProvenance:
    digests = "\n".join(part.prompts_digest for part in parts)
    return replace(
        parts[0],
        recipe=_distinct(part.recipe for part in parts),
        prompts=sum(part.prompts for part in parts),
        prompts_digest=hashlib.sha256(digests.encode()).hexdigest(),
        calls=_summed_calls([part.calls for part in parts]),
        versions={
            name: _distinct(part.versions.get(name, "unknown") for part in parts)
            for name in parts[0].versions
        },
    )


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))
