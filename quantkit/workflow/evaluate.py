"""Measuring what packing cost: pictures and numbers of packed pipelines against their original."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch

from quantkit.calibration.statistics.layer_statistics import load_calibration
from quantkit.errors import InputError
from quantkit.eval.judging import evaluation
from quantkit.eval.judging.evaluation import (
    Background,
    Baseline,
    Pair,
    common_dtype,
    measure_baseline,
    open_pair,
)
from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.judging.gates import Limits, State, judge_all
from quantkit.eval.judging.quantized_pipeline import refuse_device, rehearse
from quantkit.eval.judging.verdict import WORDS
from quantkit.eval.measuring.backbones import Backbones, load_backbones
from quantkit.eval.measuring.embedding import Pictures
from quantkit.eval.measuring.generation import (
    GenerationSettings,
    Viewer,
    choose_prompts,
    make_settings,
    unseen,
)
from quantkit.eval.measuring.judges import CARD, LEAST_OF_A_SET, load_judges
from quantkit.eval.measuring.range_map import map_ranges
from quantkit.eval.measuring.seen_prompts import find_calibrated
from quantkit.eval.pages import methods_table
from quantkit.eval.pages import report as reports
from quantkit.eval.pages.live import LiveFacts, SoFar, Watcher, unwatched
from quantkit.eval.pages.methods_table import Method, name_methods, write_methods
from quantkit.eval.pages.model_card import update_card
from quantkit.eval.pages.report import write_report
from quantkit.models.source import Model, SingleFile
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, silent
from quantkit.sensitivity.sensitivity_file import load_sensitivity
from quantkit.storage.files import staged_directory, write_or_keep
from quantkit.storage.places import check_directory, refuse_overlap
from quantkit.workflow.arguments import ModelLike, PromptsLike, as_model, as_path, as_prompts
from quantkit.workflow.viewers import watched

__all__ = [
    "Compared",
    "EvaluationSettings",
    "Limits",
    "Report",
    "SoFar",
    "compare",
    "evaluate",
    "unwatched",
]

PackedLike: TypeAlias = str | Path


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation: pictures, metrics and judges."""

    #: texts, or a file with one a line; None: the bundled set
    prompts: PromptsLike | None = None
    #: None: all of those given, or 64 of the bundled set on a GPU and 16 on a CPU
    count: int | None = None
    #: denoising steps
    steps: int = 20
    #: None: the pipeline's own default
    guidance: float | None = None
    #: of the first prompt's noise; the next has the next
    seed: int = 0
    #: prompts at a time
    batch: int = 4
    #: torchvision's AlexNet weights, or a folder with a feature network; None: torchvision's cache
    lpips_weights: str | Path | None = None
    #: directory or hub id of the CLIP score's model; None: openai/clip-vit-base-patch32
    clip: str | None = None
    #: metrics to leave out: lpips, clip; their gates are then not judged
    without: tuple[str, ...] = ()
    #: run the original twice more, in another 16-bit dtype and in other batches
    noise_floor: bool = True
    #: names of quantkit.eval.measuring.judges.JUDGES, each with =SOURCE for weights of your own
    judges: tuple[str, ...] = ()
    #: also measure what tables of other tools print: the judges of CARD, of LEAST_OF_A_SET pictures
    card: bool = False
    #: report.html shows the pictures in images/ and holds none
    beside: bool = False

    @property
    def shown(self) -> Pictures:
        """The place of the pages' pictures."""
        return Pictures.BESIDE if self.beside else Pictures.INSIDE

    def pictures(self, device: torch.device, *, last: bool) -> GenerationSettings:
        """Return prompts, seeds and steps; see ``choose_prompts`` for ``last``.

        Raises:
            InputError: prompts that cannot be used.
        """
        given = self.prompts if not isinstance(self.prompts, str) else Path(self.prompts)
        chosen = choose_prompts(given, self.count, device=device, last=last)
        if self.card and self.count is None:
            # Each with other seeds when it comes again, so that no picture does.
            chosen = tuple(islice(cycle(chosen), max(len(chosen), LEAST_OF_A_SET)))
        return make_settings(
            chosen,
            steps=self.steps,
            guidance=self.guidance,
            seed=self.seed,
            batch=self.batch,
        )

    def backbones(self, device: torch.device) -> Backbones:
        """Return the networks of LPIPS, CLIP score and judges.

        Raises:
            InputError: an unknown judge, or one whose package is not installed.
            ModelError: a network that cannot be had.
        """
        weights = as_path(self.lpips_weights)
        asked = {text.partition("=")[0] for text in self.judges}
        besides = tuple(name for name in CARD if self.card and name not in asked)
        judges = load_judges((*self.judges, *besides), device=device)
        found = load_backbones(weights, self.clip, self.without, device=device)
        return replace(found, judges=judges)


@dataclass(frozen=True)
class EvaluationPlan:
    """The plan of an evaluation."""

    prompts: int
    steps: int
    #: packed ones and their original
    pipelines: int
    noise_floor: bool
    output: Path | None

    def __repr__(self) -> str:
        """Return it in a line."""
        which = "both pipelines" if self.pipelines == 2 else f"{self.pipelines} pipelines"
        floor = ", the original twice more for its noise floor," * self.noise_floor
        return (
            f"would run {self.prompts} prompts of {self.steps} steps through {which}{floor} "
            f"and write {self.output or 'nothing'}"
        )


@dataclass(frozen=True, eq=False)
class Compared:
    """Several packed pipelines against one run of their original."""

    methods: tuple[Method, ...]
    #: the folder with the table; None: nothing was written
    output: Path | None

    @property
    def state(self) -> State:
        """Failed when one fails, undecided when one is, passed when all pass."""
        return judge_all([method.report.state for method in self.methods])

    @property
    def passed(self) -> bool:
        """True when the gates of all pass."""
        return all(method.report.passed for method in self.methods)

    @property
    def headline(self) -> str:
        """The number of passes, on one line."""
        count = len(self.methods)
        passing = sum(method.report.passed for method in self.methods)
        return f"{WORDS[self.state]}: {passing} of {count} packed pipelines keep their gates"

    def __repr__(self) -> str:
        """Return a verdict for each."""
        lines = [f"{method.name}: {method.report.verdict}" for method in self.methods]
        return "\n".join([*lines, f"written: {self.output or 'nothing'}"])

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        values: dict[str, Any] = methods_table.to_json(self.methods)
        return values


def evaluate(
    model: ModelLike,
    packed: PackedLike,
    *,
    output: str | Path | None = None,
    settings: EvaluationSettings = EvaluationSettings(),
    limits: Limits = Limits(),  # noqa: B008  frozen
    calibration: str | Path | None = None,
    sensitivity: str | Path | None = None,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    commands: Sequence[str] = (),
    watch: Watcher | None = None,
    progress: Progress = silent,
) -> Report | Any:
    """Run a packed pipeline and its original on the same prompts and noise, and measure.

    Args:
        model: the original: its directory, a hub id, or opened.
        packed: the packed directory; or another 16-bit pipeline of the model, as a recovered one;
            or what another tool quantized: a pipeline, a component alone, a .gguf file.
        output: the folder for report.html, report.md, report.json and the pictures; the model card
            that packing wrote gets the figures, too. None: nothing is written.
        settings: which pictures are made, and what they are measured with.
        limits: of the gates.
        calibration: the file that it was packed with: prompts that are compared, too, are noticed.
        sensitivity: the file of the same model: says which layers to treat better if gates fail.
        device: auto, cpu or cuda[:N]: where all pipelines run.
        force: replace an existing output.
        dry_run: say what would run, and run nothing.
        commands: what a reader types to make the report again.
        watch: told of the worst pair after every few pictures; report.html is then there from the
            beginning, and shows them. None: it is written at the end, and so is its folder.
        progress: told of every denoising step.

    Returns:
        every metric with its interval, the noise floor, gates and verdict; with ``dry_run`` an
        ``EvaluationPlan``.

    Raises:
        InputError: directories that do not belong together, prompts or networks that cannot be
            used, or an output that exists.
        NonFiniteError: a picture holds NaN or Inf.
    """
    path, place = as_path(output), choose_device(device)
    if path is not None:
        check_directory(path, kind=reports.KIND, force=force)
    elif watch is not None:
        raise InputError("watch: fills a page, and no output is given; give one", fields=("watch",))
    (pair,) = _open_pairs(model, [packed], place)
    if path is not None:
        _refuse_overlaps(path, pair.model, [packed])
    pictures = settings.pictures(place, last=settings.prompts is None)
    if dry_run:
        return _planned(path, 1, pictures, settings)
    backbones = settings.backbones(place)
    background = _background(calibration, sensitivity, settings)
    _rehearse([pair], pictures, place, progress)
    facts = LiveFacts(pair.title, pictures, tuple(commands))
    with watched(path, facts, watch, progress, force=force) as viewers:
        baseline = baseline_of(
            pair.model, pictures, settings, backbones, place, dtype=pair.dtype,
            viewer=viewers.original, progress=viewers.progress,
        )  # fmt: skip
        report, pairs = evaluation.evaluate(
            pair,
            baseline,
            limits=limits,
            commands=tuple(commands),
            background=background,
            viewer=viewers.packed,
            progress=viewers.progress,
        )
        if path is not None:
            write = partial(
                write_report, report, pairs, force=viewers.force, pictures=settings.shown
            )
            write_or_keep(write, path)
            update_card(Path(packed), report)
    return report


def compare(
    model: ModelLike,
    packed: Sequence[PackedLike],
    *,
    output: str | Path,
    settings: EvaluationSettings = EvaluationSettings(),
    limits: Limits = Limits(),  # noqa: B008  frozen
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> Compared | Any:
    """Run the original once and several packed pipelines, and write one table of methods.

    Args:
        model: the original: its directory, a hub id, or opened.
        packed: packed directories, or what else ``evaluate`` takes.
        output: the folder for index.html, methods.md, methods.json, and a report of each.
        settings: which pictures are made, and what they are measured with.
        limits: of the gates.
        device: auto, cpu or cuda[:N]: where all pipelines run.
        force: replace an existing output.
        dry_run: say what would run, and run nothing.
        commands: what a reader types to make the table again.
        progress: told of every denoising step.

    Returns:
        a report of each packed directory, in their order; with ``dry_run`` an ``EvaluationPlan``.

    Raises:
        InputError: directories that do not belong together, prompts or networks that cannot be
            used, or an output that exists.
        NonFiniteError: a picture holds NaN or Inf.
    """
    path, place = Path(output), choose_device(device)
    check_directory(path, kind=methods_table.KIND, force=force)
    names = name_methods([Path(folder) for folder in packed])
    # Every directory is opened before the long work: a broken one should not be found out last.
    opened = _open_pairs(model, packed, place)
    _refuse_overlaps(path, opened[0].model, packed)
    pictures = settings.pictures(place, last=settings.prompts is None)
    if dry_run:
        return _planned(path, len(packed), pictures, settings)
    backbones = settings.backbones(place)
    _rehearse(opened, pictures, place, progress)
    rows = []
    with staged_directory(path, kind=methods_table.KIND, force=force) as stage:
        first, dtype = opened[0].model, common_dtype(opened)
        baseline = baseline_of(
            first, pictures, settings, backbones, place, dtype=dtype, progress=progress
        )
        for name, pair in zip(names, opened, strict=True):
            report, pairs = evaluation.evaluate(
                pair,
                baseline,
                limits=limits,
                commands=tuple(commands),
                progress=_named(name, progress),
            )
            shown = settings.shown
            write_report(report, pairs, stage / name, force=False, pictures=shown, indexed=True)
            rows.append(Method(name, report, name))
        write_methods(rows, stage, tuple(commands))
    return Compared(tuple(rows), path)


def _planned(
    output: Path | None, packed: int, pictures: GenerationSettings, settings: EvaluationSettings
) -> EvaluationPlan:
    count, steps = len(pictures.prompts), pictures.steps
    return EvaluationPlan(count, steps, 1 + packed, settings.noise_floor, output)


def baseline_of(
    model: Model,
    pictures: GenerationSettings,
    settings: EvaluationSettings,
    backbones: Backbones,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    viewer: Viewer = unseen,
    progress: Progress,
) -> Baseline:
    """Run the original, and its noise floor where that is asked for."""
    return measure_baseline(
        model,
        pictures,
        backbones=backbones,
        device=device,
        noise_floor=settings.noise_floor,
        dtype=dtype,
        viewer=viewer,
        progress=progress,
    )


def fetch_networks(
    *,
    lpips_weights: str | Path | None = None,
    clip: str | None = None,
    without: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Download the networks of metrics that are not in the caches.

    Args:
        lpips_weights: torchvision's AlexNet weights; None: torchvision's cache.
        clip: directory or hub id of the CLIP score's model; None: openai/clip-vit-base-patch32.
        without: lpips, clip: the network to leave out.

    Returns:
        the names of the networks that are there now.

    Raises:
        ModelError: one that cannot be had; all such are named.
    """
    found = load_backbones(as_path(lpips_weights), clip, without, device=torch.device("cpu"))
    return tuple(network.name for network in (found.lpips, found.clip) if network is not None)


def _background(
    calibration: str | Path | None, sensitivity: str | Path | None, settings: EvaluationSettings
) -> Background:
    """Open the artefacts that the pipeline was packed with."""
    measured = None
    if sensitivity is not None:
        measured = load_sensitivity(Path(sensitivity)), str(sensitivity)
    prompts = as_prompts(settings.prompts)
    if calibration is None:
        return Background(None, measured, prompts=len(prompts))
    opened = load_calibration(Path(calibration))
    about = opened.metadata
    sources = (prompts, as_prompts(None))
    found = find_calibrated(about.prompts_digest, about.prompts, sources)
    return Background(found, measured, map_ranges(opened), len(prompts))


def _open_pairs(model: ModelLike, packed: Sequence[PackedLike], device: torch.device) -> list[Pair]:
    """Open the original with each of the others, and refuse pairs that cannot run here."""
    pairs = [open_pair(_opened(model), Path(folder)) for folder in packed]
    for pair in pairs:
        if pair.quantized:
            refuse_device(pair.quantized, device)
    common_dtype(pairs)
    return pairs


def _rehearse(
    pairs: Sequence[Pair], pictures: GenerationSettings, device: torch.device, progress: Progress
) -> None:
    """Try pipelines of other tools before the original runs."""
    dtype = common_dtype(pairs)
    for pair in pairs:
        if pair.quantized:
            rehearse(pair.quantized, pair.model, pictures, device, dtype, progress=progress)


def _refuse_overlaps(output: Path, model: Model, packed: Sequence[PackedLike]) -> None:
    for source in (model.path, *packed):
        refuse_overlap(output, Path(source))


def _opened(model: ModelLike) -> str | Model:
    """Return the original, under the name that reports use."""
    return as_model(model) if isinstance(model, Model | SingleFile) else str(model)


def _named(name: str, progress: Progress) -> Progress:
    return lambda step, done, total: progress(f"{name}: {step}", done, total)
