"""Saving the state of a training atomically, and resuming from it."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.checkpoint.component import PackedComponent
from quantkit.errors import ArtefactError, OutputError
from quantkit.models.source import Component
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.student_training import Trainer
from quantkit.recovery.distill.training_progress import Clock, ScoredStep, TrainingProgress
from quantkit.sparsity.maskfile import MaskSet
from quantkit.storage.artefact import read_artefact, write_artefact
from quantkit.storage.digest import sha256_of_range
from quantkit.storage.inputfile import open_file
from quantkit.storage.jsonfile import as_type, parsing

_KIND = "quantkit_recovery"


def identify(
    component: Component,
    masks: MaskSet | None,
    packed: PackedComponent | None,
    settings: DistillSettings,
    prompts: Sequence[str],
) -> dict[str, Any]:
    """Return the identity that a resumed training must share with the saved one.

    Returns:
        JSON values; a checksum each of the model, the masks, the packed model and the prompts, and
        all settings.
    """
    chosen = {} if masks is None else masks.of(component)
    bits = {
        name: hashlib.sha256(m.bits.numpy().tobytes()).hexdigest() for name, m in chosen.items()
    }
    codes = [] if packed is None else [metadata.tensors for metadata in packed.metadata]
    return {
        "model": _digest([_file_digest(path) for path in component.shards]),
        "masks": _digest(bits),
        "packed": _digest(codes),
        "prompts": _digest(list(prompts)),
        **asdict(settings),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with open_file(path) as file:
        return sha256_of_range(file.fileno(), 0, path.stat().st_size)


class Checkpoint:
    """One file that a training is saved to now and then; it is overwritten."""

    def __init__(self, path: Path, identity: Mapping[str, Any], every: float) -> None:
        """Prepare to save.

        Args:
            path: the file.
            identity: of ``identify``, and how many processes.
            every: seconds after which a training is saved again.
        """
        self._path = path
        self._identity = dict(identity)
        self._every = every
        self._saved = time.monotonic()

    def due(self) -> bool:
        """Tell whether it is time."""
        return time.monotonic() - self._saved >= self._every

    def save(self, trainer: Trainer) -> None:
        """Write weights, average, moments and progress.

        Raises:
            OutputError: the file cannot be written.
        """
        about = {
            "identity": self._identity,
            "step": trainer.step,
            "seconds": trainer.clock.elapsed,
            "chunks": trainer.chunks,
            "oldest": trainer.oldest,
            "points": [asdict(point) for point in trainer.points],
            "first_look": trainer.first_look and asdict(trainer.first_look),
        }
        write_artefact(self._path, _KIND, trainer.stepper.state(), about, force=True)
        self._saved = time.monotonic()

    def resume(self, trainer: Trainer) -> None:
        """Restore the saved training.

        Raises:
            ArtefactError: no such file, a damaged one, or one of another training.
        """
        state, about = read_artefact(self._path, _KIND)
        with parsing(self._path, cure="do not resume, and begin again"):
            refuse_others(self._path, about["identity"], self._identity)
            trainer.step = int(about["step"])
            trainer.clock = Clock(float(about["seconds"]))
            trainer.chunks, trainer.oldest = int(about["chunks"]), int(about["oldest"])
            trainer.points = [as_type(TrainingProgress, values) for values in about["points"]]
            first = about["first_look"]
            trainer.first_look = None if first is None else as_type(ScoredStep, first)
            trainer.stepper.restore(state, trainer.step)

    def remove(self) -> None:
        """Drop the file: the training is over and its result is written."""
        self._path.unlink(missing_ok=True)


def refuse_others(path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse to go on with what was begun otherwise.

    Args:
        path: the file, for the message.
        saved: what it was begun with, as ``identify`` says it.
        expected: what it shall go on with.

    Raises:
        ArtefactError: naming the first difference.
    """
    for name in sorted({*saved, *expected}):
        then, now = saved.get(name), expected.get(name)
        if then != now:
            raise ArtefactError(
                f"{path}: {name} was {_short(then)} and is {_short(now)}; resume with the same "
                "settings, or do not resume",
                fields=("resume",),
            )


def refuse_unfinished(path: Path, *, resume: bool, force: bool) -> None:
    """Refuse to write over a training that could go on, or to go on without one.

    Raises:
        ArtefactError: nothing to go on with.
        OutputError: a saved training, and neither ``resume`` nor ``force``.
    """
    if resume and not path.is_file():
        raise ArtefactError(
            f"{path}: no training was saved there; do not resume", fields=("resume",)
        )
    if path.exists() and not (resume or force):
        raise OutputError(
            f"{path}: holds an unfinished training; resume it, or set force to start again",
            fields=("resume", "force"),
        )


def _short(value: object) -> str:
    text = str(value)
    return f"checksum {text[:12]}" if isinstance(value, str) and len(text) == 64 else text
