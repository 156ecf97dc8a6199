"""Calibrating: statistics of what a pipeline's layers read, from prompts or from several runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.calibration.observing import collect
from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    load_calibration,
    save_calibration,
    tell_unseen,
)
from quantkit.calibration.statistics.merge import merge
from quantkit.errors import ArtefactError
from quantkit.pipelines.processes import Processes, joined
from quantkit.pipelines.running import choose_device, refuse_component
from quantkit.progress import Progress, Tell, silent, unheard
from quantkit.recipe.recommended import DEFAULT
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import check_file, refuse_overlap
from quantkit.workflow.arguments import (
    ModelLike,
    PromptsLike,
    RecipeLike,
    as_path,
    opened,
    with_prompts,
)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A calibration, and where it was written."""

    calibration: Calibration
    #: None: nowhere
    output: Path | None

    @property
    def plan(self) -> "CalibrationPlan":
        """The plan that this calibration carried out."""
        about, observed = self.calibration.metadata, self.calibration.layers
        names = {component: tuple(layers) for component, layers in observed.items()}
        return CalibrationPlan(about.prompts, about.steps, len(self.calibration.edges) + 1, names)

    @property
    def unseen(self) -> dict[str, tuple[str, ...]]:
        """The layers that no prompt called, by component; static scales are chosen for none."""
        observed, known = self.calibration.layers, self.calibration.metadata.digests
        found = {
            component: tuple(layer for layer in layers if layer not in observed[component])
            for component, layers in known.items()
        }
        return {component: layers for component, layers in found.items() if layers}

    @property
    def unseen_summary(self) -> str:
        """The layers that no prompt called, in a line; empty where there is none."""
        return tell_unseen(self.unseen).strip()

    def __repr__(self) -> str:
        """Return what it was taken from, in two lines."""
        about = self.calibration.metadata
        counts = {name: len(layers) for name, layers in self.calibration.layers.items()}
        layers = ", ".join(f"{name} {count}" for name, count in counts.items())
        return (
            f"Calibration: layers {layers}; {about.prompts} prompts, {about.steps} steps, "
            f"{len(self.calibration.edges) + 1} buckets\n"
            f"{tell_unseen(self.unseen)}written: {self.output or 'nothing'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, the largest input of every layer and bucket included."""
        about = self.calibration.metadata
        return {
            "written": None if self.output is None else str(self.output),
            "prompts": about.prompts,
            "steps": about.steps,
            "buckets": len(self.calibration.edges) + 1,
            "edges": list(self.calibration.edges),
            "components": {
                name: {
                    "calls": about.calls[name],
                    "layers": {layer: stats.amax.tolist() for layer, stats in layers.items()},
                }
                for name, layers in self.calibration.layers.items()
            },
            "unseen": {name: list(layers) for name, layers in self.unseen.items()},
        }


@dataclass(frozen=True)
class CalibrationPlan:
    """The plan of a calibration."""

    prompts: int
    steps: int
    buckets: int
    #: the layers' names, by component
    layers: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, run: collect.CalibrationRun) -> "CalibrationPlan":
        """Return what a run observes."""
        layers = {name: tuple(layer.name for layer in found) for name, found in run.layers.items()}
        return cls(len(run.prompts), run.settings.steps, run.settings.buckets, layers)

    def __repr__(self) -> str:
        """Return it in a line."""
        counts = ", ".join(f"{name} {len(layers)}" for name, layers in self.layers.items())
        return (
            f"would observe: layers {counts}; {self.prompts} prompts, {self.steps} steps, "
            f"{self.buckets} buckets"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "written": None,
            "prompts": self.prompts,
            "steps": self.steps,
            "buckets": self.buckets,
            "edges": None,
            "components": {name: {"layers": list(layers)} for name, layers in self.layers.items()},
        }


def calibrate(
    model: ModelLike,
    *,
    recipe: RecipeLike = DEFAULT,
    output: str | Path | None = None,
    prompts: PromptsLike | None = None,
    count: int | None = None,
    resume: bool = False,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
    tell: Tell = unheard,
) -> Calibrated | Any:
    """Run a pipeline on prompts, and store statistics of its layers' inputs.

    Processes that ``torchrun`` or ``accelerate launch`` started share the prompts.

    Args:
        model: a pipeline: its directory, a hub id, or opened.
        recipe: whose calibration section says how to run; all layers are observed.
        output: the file to write; None: nothing is written, and one process does it all.
        prompts: texts, or a file with one a line; None: the bundled set.
        count: use the first so many prompts; None: all of those given, or the recipe's number.
        resume: go on with the saved state of a run that was killed, next to the output.
        device: auto, cpu or cuda[:N]; float32 on the CPU, else the 16-bit dtype of the weights.
        force: replace an existing file.
        dry_run: say what would be observed, and write nothing.
        progress: told of weights hashed and of denoiser calls.
        tell: told a line where there was nothing to resume yet.

    Returns:
        the statistics, or with ``dry_run`` the ``CalibrationPlan``; None in all but the first of
        several processes.

    Raises:
        InputError: a model, recipe or prompts that cannot be used, an output that exists, nothing
            to resume.
        NonFiniteError: NaN or Inf in an activation; the text names layer and step.
    """
    path = as_path(output)
    if path is None and not dry_run:
        run = _opened(model, recipe, prompts, count, device)
        found = collect.calibrate(
            run.model, run.recipe, run.texts, device=device, progress=progress
        )
        return Calibrated(found, None)
    with joined() as processes:
        with processes.together():
            run = _opened(model, recipe, prompts, count, device)
            if path is not None:
                _check_output(path, run, force=force)
        if dry_run or path is None:
            return CalibrationPlan.of(run) if processes.is_first else None
        return _share(
            run, path, processes, resume=resume, force=force, progress=progress, tell=tell
        )


def merge_calibrations(
    calibrations: Sequence[str | Path], *, output: str | Path | None = None, force: bool = False
) -> Calibrated:
    """Merge calibrations of one model into what one run over all their prompts would store.

    Args:
        calibrations: two files or more with the same layers, timestep buckets, steps and guidance,
            in the order of their prompts.
        output: the file to write; None: nothing is written.
        force: replace an existing file.

    Returns:
        the merged statistics.

    Raises:
        ArtefactError: fewer than two, or files that do not belong together.
        OutputError: the output exists.
    """
    path, files = as_path(output), [Path(file) for file in calibrations]
    if path is not None:
        check_file(path, force=force)
    parts = {str(file): file for file in files}
    if len(files) < 2 or len(parts) < len(files):
        raise ArtefactError(
            f"merge: {len(files)} files, {len(parts)} of them different, expected two or more "
            "different ones; give each run once"
        )
    merged = merge({name: load_calibration(file) for name, file in parts.items()})
    if path is not None:
        save_calibration(merged, path, force=force)
    return Calibrated(merged, path)


def _opened(
    model: ModelLike,
    recipe: RecipeLike,
    prompts: PromptsLike | None,
    count: int | None,
    device: str,
) -> collect.CalibrationRun:
    source, chosen = opened(model, recipe)
    chosen, texts = with_prompts(chosen, prompts, count)
    chosen.refuse_unmergeable()
    run = collect.CalibrationRun(source, chosen, texts, device)
    # What loading would refuse, after minutes of hashing.
    refuse_component(source)
    choose_device(device)
    return run


def _check_output(output: Path, run: collect.CalibrationRun, *, force: bool) -> None:
    check_file(output, force=force)
    refuse_overlap(output, run.model.path)


def _share(
    run: collect.CalibrationRun,
    output: Path,
    processes: Processes,
    *,
    resume: bool,
    force: bool,
    progress: Progress,
    tell: Tell,
) -> Calibrated | None:
    """Calibrate this process's share, and write in the first process."""
    calibration, kept = collect.calibrate_share(
        run,
        output,
        processes=processes,
        resume=resume,
        progress=progress if processes.is_first else silent,
        note=tell,
    )
    with processes.together():
        if calibration is not None:
            write_or_keep(partial(save_calibration, calibration, force=force), output)
    kept.discard()
    return None if calibration is None else Calibrated(calibration, output)
