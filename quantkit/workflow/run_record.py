"""The record of a run next to its artefacts: digests of its inputs, a log, and durations.

``run.json`` has digests of all inputs that decide the artefacts, so that a later run knows whether
it may reuse them. An artefact appears when it is complete, so one of the same inputs is not made
again. Durations are kept in the cache, where the next run of the same inputs finds them.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from quantkit._version import __version__
from quantkit.device.cache import cache_directory
from quantkit.errors import ArtefactError, InputError, OutputError
from quantkit.models.source import Model
from quantkit.progress import Progress
from quantkit.recipe.schema import Recipe
from quantkit.storage.files import rewritten_file
from quantkit.storage.jsonfile import read_json

RECORD = "run.json"
LOG = "run.log"


@dataclass(frozen=True)
class RunRecord:
    """Digests of the inputs that decide the artefacts of a run."""

    #: of names, sizes and times of the model's files: hashing them would take as long as packing
    model: str
    recipe: str
    #: of the prompts that are calibrated on
    prompts: str
    #: cpu or cuda: their arithmetic differs
    device: str
    quantkit: str = __version__

    @classmethod
    def of(cls, model: Model, recipe: Recipe, prompts: Sequence[str], device: str) -> "RunRecord":
        """Return the record of a run on a kind of device."""
        found = [model.path, *sorted(model.path.rglob("*"))]
        files = [path for path in found if path.is_file()]
        facts = [(str(path.relative_to(model.path)), *_size_and_time(path)) for path in files]
        return cls(
            _digest(facts), _digest(recipe.model_dump(mode="json")), _digest(prompts), device
        )

    def refuse_other(self, output: Path) -> None:
        """Refuse to go on with artefacts that follow from something else.

        Raises:
            OutputError: the folder's record is missing, or another one.
        """
        try:
            stored = read_json(output / RECORD, error=ArtefactError, cure="begin again")
        except InputError as error:
            raise OutputError(
                f"{error}; only a run's own folder can be gone on with: set force to begin again, "
                "or choose another path",
                fields=("force",),
            ) from error
        others = [name for name, value in vars(self).items() if stored.get(name) != value]
        if others:
            raise OutputError(
                f"{output / RECORD}: of another {', '.join(others)}; set force to begin again, or "
                "choose another path",
                fields=("force",),
            )

    def write(self, output: Path) -> None:
        """Write the record into the folder of a run."""
        with rewritten_file(output / RECORD) as made:
            record = {"schema": "quantkit.run", **vars(self)}
            made.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @property
    def last_seconds(self) -> float | None:
        """The duration of the last complete run of the same inputs; None: not known."""
        try:
            return float(read_json(self._time_file)["seconds"])
        except (InputError, KeyError, TypeError, ValueError):
            return None

    def remember(self, seconds: float) -> None:
        """Store the duration in the cache, if it can be written."""
        with suppress(OSError, OutputError):
            self._time_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with rewritten_file(self._time_file) as made:
                made.write_text(json.dumps({"seconds": round(seconds, 1)}), encoding="utf-8")

    @property
    def _time_file(self) -> Path:
        key = _digest([self.model, self.recipe, self.device])
        return cache_directory() / "runs" / f"{key[:24]}.json"


@contextmanager
def logged(path: Path, progress: Progress) -> Iterator[Progress]:
    """Yield a progress that also writes the beginning and the end of steps into a file.

    What the library warns of, and how it ended, are there, too. An earlier log is added to.

    Args:
        path: the file.
        progress: told all the same.

    Yields:
        what to tell.

    Raises:
        OSError: the file cannot be written.
    """
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    library, own = logging.getLogger("quantkit"), logging.getLogger(f"{__name__}.steps")
    # Into the file alone: bars show the steps on the screen.
    own.propagate = False
    own.setLevel(logging.INFO)
    for logger in (library, own):
        logger.addHandler(handler)
    started = perf_counter()
    try:
        yield _Steps(progress, own, {})
    except BaseException as error:
        own.error("%s: %s", type(error).__name__, " ".join(str(error).split()))
        raise
    finally:
        own.info("ended after %.1f s", perf_counter() - started)
        for logger in (library, own):
            logger.removeHandler(handler)
        handler.close()


@dataclass(frozen=True)
class _Steps:
    progress: Progress
    log: logging.Logger
    #: step -> when it began; None: it is over
    begun: dict[str, float | None]

    def __call__(self, step: str, done: int, total: int) -> None:
        self.progress(step, done, total)
        now = perf_counter()
        if step not in self.begun:
            self.begun[step] = now
            self.log.info("%s: %d to do", step, total)
        since = self.begun[step]
        if done >= total and since is not None:
            self.begun[step] = None
            self.log.info("%s: %d done in %.1f s", step, total, now - since)


def _size_and_time(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
