"""Partial calibrations, kept while one runs, so that one that was killed can go on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.fields import Statistics, StatisticsT, Tensors
from quantkit.calibration.statistics.layer_statistics import (
    LayerStatistics,
    Tables,
    edges_of,
    named_tensors,
    tables_of,
)
from quantkit.calibration.statistics.merge import Part
from quantkit.errors import ArtefactError
from quantkit.pipelines.processes import Processes
from quantkit.storage.artefact import read_artefact, write_artefact
from quantkit.storage.jsonfile import parsing

_KIND = "quantkit_partial_sums"
#: Seconds between two writes, and how many times as long as the last write took: at most a
#: twentieth of the time goes into writing.
_PAUSE, _SHARE = 5.0, 20.0


@dataclass(frozen=True, eq=False)
class PartialSums:
    """The sums of one process after some of its batches."""

    #: by component and layer, in the order of first calls
    sums: Tables
    #: by component and attention module, in the same order
    attention: Tables
    edges: tuple[float, ...]
    #: calls of the denoiser per bucket
    calls: dict[str, list[int]]
    batches: int
    #: batches that ran at once, if that is known: one that goes on gives the same bytes
    at_once: int | None = None

    def part(self) -> Part:
        """Return what the sums come to."""
        layers = _come_to(LayerStatistics, self.sums)
        attention = _come_to(AttentionStatistics, self.attention)
        found = {component: modules for component, modules in attention.items() if modules}
        return Part(layers, found, self.edges, self.calls, self.batches)


def _come_to(
    kind: type[StatisticsT], tables: Mapping[str, Mapping[str, Tensors]]
) -> dict[str, dict[str, StatisticsT]]:
    return {
        component: {name: kind.of_sums(sums) for name, sums in table.items()}
        for component, table in tables.items()
    }


@dataclass(frozen=True)
class PartialFile:
    """The partial calibration of one process, in the folder of the output."""

    output: Path
    processes: Processes
    #: what the run is made of; another run's is not gone on with
    facts: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The file."""
        of = f"{self.processes.rank + 1}-of-{self.processes.count}"
        return self.output.parent / f".{self.output.name}.part-{of}"

    def read(self) -> PartialSums | None:
        """Return what was kept, or None when the run ended before the first was.

        Raises:
            ArtefactError: damaged, or of a run with other settings.
        """
        if not self.path.exists():
            return None
        tensors, about = read_artefact(self.path, _KIND)
        with parsing(self.path, cure="do not resume"):
            self._refuse_others(about["facts"])
            edges = edges_of(about["edges"])
            of_layers, of_attention = tables_of(tensors)
            buckets = len(edges) + 1
            sums = _checked(LayerStatistics, about["layers"], of_layers, buckets)
            attention = _checked(AttentionStatistics, about["attention"], of_attention, buckets)
            calls = {name: list(map(int, found)) for name, found in about["calls"].items()}
            at_once = None if about["at_once"] is None else int(about["at_once"])
            return PartialSums(sums, attention, edges, calls, int(about["batches"]), at_once)

    def _refuse_others(self, found: Mapping[str, Any]) -> None:
        facts = json.loads(json.dumps(dict(self.facts)))
        for name in {**facts, **found}:
            if found.get(name) != facts.get(name):
                raise ArtefactError(
                    f"{self.path}: {name} was {_short(found.get(name))} and is "
                    f"{_short(facts.get(name))}; resume with the same settings, or do not resume",
                    fields=("resume",),
                )

    def write(self, found: PartialSums) -> None:
        """Replace what was kept.

        Raises:
            OutputError: it cannot be written.
        """
        about = {
            "facts": dict(self.facts),
            "edges": found.edges,
            "calls": found.calls,
            "batches": found.batches,
            "at_once": found.at_once,
            "layers": {component: list(layers) for component, layers in found.sums.items()},
            "attention": {component: list(names) for component, names in found.attention.items()},
        }
        tensors = named_tensors(found.sums, found.attention)
        write_artefact(self.path, _KIND, tensors, about, force=True)

    def discard(self) -> None:
        """Delete it, and what runs of another number of processes left."""
        self.path.unlink(missing_ok=True)
        if self.processes.is_first:
            for other in others(self.output):
                other.unlink(missing_ok=True)


def others(output: Path) -> list[Path]:
    """Return all partial calibrations of an output."""
    prefix = f".{output.name}.part-"
    return sorted(p for p in output.parent.glob(".*") if p.name.startswith(prefix))


@dataclass
class WriteInterval:
    """Intervals between writes."""

    _due: float = field(default_factory=lambda: monotonic() + _PAUSE)

    def is_due(self) -> bool:
        """Tell whether enough time has passed since the last write."""
        return monotonic() >= self._due

    def wrote(self, started: float) -> None:
        """Take note of a write that began at ``started`` (monotonic seconds)."""
        now = monotonic()
        self._due = now + max(_PAUSE, _SHARE * (now - started))


def _checked(
    kind: type[Statistics], names: Mapping[str, Sequence[str]], tables: Tables, buckets: int
) -> Tables:
    """Return sums by component and name, in the order of the names.

    Raises:
        LookupError, ValueError: sums that are missing, unknown, or of a wrong shape or value.
    """
    found: Tables = {}
    for component, owners in names.items():
        table = tables.pop(component, {})
        found[component] = {name: table.pop(name) for name in owners}
        tables |= {component: table} if table else {}
        for name, sums in found[component].items():
            kind.check_sums(f"{component}/{name}", sums, buckets)
    if tables:
        raise ValueError(f"sums of {min(tables)}, which nothing is said about")
    return found


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return f"{text[:12]}..." if len(text) > 40 else text
