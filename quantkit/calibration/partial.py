"""What is kept of a calibration while it runs, so that one that was killed can go on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from quantkit.calibration.artefact import read_artefact, write_artefact
from quantkit.calibration.merge import Part
from quantkit.calibration.processes import Processes
from quantkit.calibration.statistics import layers_of_tensors, tensors_of_layers
from quantkit.errors import ArtefactError

_KIND = "quantkit_partial_calibration"
#: Seconds between two writes, and how many times as long as the last write took: at most a
#: twentieth of the time goes into writing.
_PAUSE, _SHARE = 5.0, 20.0


@dataclass(frozen=True)
class Kept:
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

    def read(self) -> Part | None:
        """Return what was kept, or None when the run ended before the first was.

        Raises:
            ArtefactError: damaged, or of a run with other settings.
        """
        if not self.path.exists():
            return None
        tensors, about = read_artefact(self.path, _KIND)
        wanted = json.loads(json.dumps(dict(self.facts)))
        for name in {**wanted, **about["facts"]}:
            found = about["facts"].get(name)
            if found != wanted.get(name):
                raise ArtefactError(
                    f"{self.path}: {name} {_short(found)}, wanted {_short(wanted.get(name))}; run "
                    "with the same settings to go on, or without --resume to start again"
                )
        edges = tuple(map(float, about["edges"]))
        try:
            layers = layers_of_tensors(tensors, len(edges) + 1)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"{self.path}: damaged ({error}); run without --resume") from error
        return Part(layers, edges, about["calls"], about["batches"])

    def write(self, part: Part) -> None:
        """Replace what was kept.

        Raises:
            OutputError: it cannot be written.
        """
        about = {
            "facts": dict(self.facts),
            "edges": part.edges,
            "calls": part.calls,
            "batches": part.batches,
        }
        write_artefact(self.path, _KIND, tensors_of_layers(part.layers), about, force=True)

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
class Pace:
    """When it is time to write again."""

    _due: float = field(default_factory=lambda: monotonic() + _PAUSE)

    def is_due(self) -> bool:
        """Tell whether enough time has passed since the last write."""
        return monotonic() >= self._due

    def wrote(self, started: float) -> None:
        """Take note of a write that began at ``started`` (monotonic seconds)."""
        now = monotonic()
        self._due = now + max(_PAUSE, _SHARE * (now - started))


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return f"{text[:12]}..." if len(text) > 40 else text
