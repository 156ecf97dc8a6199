"""What is kept of a calibration while it runs, so that one that was killed can go on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from quantkit.calibration.observing.accumulators import LayerSums, statistics_of
from quantkit.calibration.observing.attention_accumulators import (
    AttentionSums,
    attention_statistics_of,
    check_attention_sums,
)
from quantkit.calibration.statistics.layer_fields import check_sums
from quantkit.calibration.statistics.layer_statistics import edges_of
from quantkit.calibration.statistics.merge import Part
from quantkit.errors import ArtefactError
from quantkit.pipelines.processes import Processes
from quantkit.storage.artefact import pack_name, read_artefact, split_name, write_artefact
from quantkit.storage.jsonfile import parsing

_KIND = "quantkit_partial_sums"
#: Seconds between two writes, and how many times as long as the last write took: at most a
#: twentieth of the time goes into writing.
_PAUSE, _SHARE = 5.0, 20.0


@dataclass(frozen=True, eq=False)
class PartialSums:
    """The sums of one process after some of its batches."""

    #: by component and layer, in the order of first calls
    sums: dict[str, dict[str, LayerSums]]
    #: by component and attention module, likewise
    attention: dict[str, dict[str, AttentionSums]]
    edges: tuple[float, ...]
    #: calls of the denoiser per bucket
    calls: dict[str, list[int]]
    batches: int
    #: batches that ran at once, if that is known: one that goes on gives the same bytes
    at_once: int | None = None

    def part(self) -> Part:
        """Return what the sums come to."""
        layers = {
            component: {layer: statistics_of(sums) for layer, sums in table.items()}
            for component, table in self.sums.items()
        }
        attention = {
            component: {name: attention_statistics_of(sums) for name, sums in table.items()}
            for component, table in self.attention.items()
            if table
        }
        return Part(layers, attention, self.edges, self.calls, self.batches)


@dataclass(frozen=True)
class PartialFile:
    """The partial calibration of one process, beside the output."""

    output: Path
    processes: Processes
    #: what the run is made of; another run's is not gone on with
    facts: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """Where it lies."""
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
            sums, attention = _empty(about["layers"]), _empty(about["attention"])
            for name, tensor in tensors.items():
                component, layer, field = split_name(name)
                table = attention if layer in attention[component] else sums
                table[component][layer][field] = tensor
            calls = {name: list(map(int, found)) for name, found in about["calls"].items()}
            edges = edges_of(about["edges"])
            for component, layers in sums.items():
                for layer, fields in layers.items():
                    check_sums(f"{component}/{layer}", fields, len(edges) + 1)
            for component, modules in attention.items():
                for name, fields in modules.items():
                    check_attention_sums(f"{component}/{name}", fields, len(edges) + 1)
            at_once = None if about["at_once"] is None else int(about["at_once"])
            return PartialSums(sums, attention, edges, calls, int(about["batches"]), at_once)

    def _refuse_others(self, found: Mapping[str, Any]) -> None:
        wanted = json.loads(json.dumps(dict(self.facts)))
        for name in {**wanted, **found}:
            if found.get(name) != wanted.get(name):
                raise ArtefactError(
                    f"{self.path}: {name} was {_short(found.get(name))} and is "
                    f"{_short(wanted.get(name))}; resume with the same settings, or do not resume",
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
        tensors = {
            pack_name(component, layer, field): tensor
            for table in (found.sums, found.attention)
            for component, layers in table.items()
            for layer, sums in layers.items()
            for field, tensor in sums.items()
        }
        write_artefact(self.path, _KIND, tensors, about, force=True)

    def discard(self) -> None:
        """Delete it, and what runs of another number of processes left."""
        self.path.unlink(missing_ok=True)
        if self.processes.is_first:
            for other in others(self.output):
                other.unlink(missing_ok=True)


def others(output: Path) -> list[Path]:
    """Return all partial calibrations beside an output."""
    prefix = f".{output.name}.part-"
    return sorted(p for p in output.parent.glob(".*") if p.name.startswith(prefix))


@dataclass
class WriteInterval:
    """When it is time to write again."""

    _due: float = field(default_factory=lambda: monotonic() + _PAUSE)

    def is_due(self) -> bool:
        """Tell whether enough time has passed since the last write."""
        return monotonic() >= self._due

    def wrote(self, started: float) -> None:
        """Take note of a write that began at ``started`` (monotonic seconds)."""
        now = monotonic()
        self._due = now + max(_PAUSE, _SHARE * (now - started))


def _empty(names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, dict[str, Tensor]]]:
    return {component: {name: {} for name in found} for component, found in names.items()}


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return f"{text[:12]}..." if len(text) > 40 else text
