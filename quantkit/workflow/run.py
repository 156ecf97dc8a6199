"""The whole job with one recipe: calibrate, sparsify, pack and evaluate."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quantkit.calibration.moments import moment_files
from quantkit.calibration.statistics.layer_statistics import load_calibration
from quantkit.eval.judging import evaluation
from quantkit.eval.judging.evaluation import (
    Background,
    open_pair,
    rehearse_original,
    require_pipeline,
)
from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.judging.gates import Limits
from quantkit.eval.measuring.generation import GenerationSettings, choose_unseen
from quantkit.eval.measuring.range_map import map_ranges
from quantkit.eval.pages import report as reports
from quantkit.eval.pages.model_card import update_card
from quantkit.eval.pages.report import write_report
from quantkit.models.source import Model, SingleFile
from quantkit.packing import pack_model as packing
from quantkit.packing.dry_run import Forecast, forecast_pack
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, Tell, silent, unheard
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.sensitivity_file import load_sensitivity
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import (
    check_directory,
    check_file,
    check_room,
    refuse_overlap,
    translated,
)
from quantkit.storage.system import make_folders
from quantkit.workflow.arguments import (
    ModelLike,
    RecipeLike,
    as_model,
    as_prompts,
    as_recipe,
    fitted,
    name_of,
)
from quantkit.workflow.build import HESSIAN_MEMORY, PACKED, build, refuse_search
from quantkit.workflow.evaluate import EvaluationSettings, baseline_of
from quantkit.workflow.hessians import MomentPlan, moments_of
from quantkit.workflow.run_record import LOG, RECORD, RunRecord, logged

_log = logging.getLogger(__name__)

#: The folder with the report, inside the output.
REPORT = "report"


@dataclass(frozen=True, eq=False)
class RunPlan:
    """The plan of a run; sizes are not known where a budget chooses the treatments."""

    recipe: Recipe
    output: Path
    files: tuple[str, ...]
    #: None: the recipe needs none
    calibration: CalibrationRecipe | None
    moments: MomentPlan | None
    #: None: a budget chooses
    forecast: Forecast | None
    pictures: GenerationSettings
    #: of the same run from its beginning, on this machine; None: not known
    last_seconds: float | None

    def __repr__(self) -> str:
        """Return it in a few lines."""
        return "\n".join(self.lines("would write"))

    def lines(self, verb: str) -> list[str]:
        """Return it in a few lines; the first has the verb."""
        lines = [f"recipe {self.recipe.name}: {verb} {', '.join(self.files)}"]
        lines[0] += f" into {self.output}"
        if self.calibration is not None:
            settings = self.calibration
            lines.append(f"calibration: {settings.prompts} prompts, {settings.steps} steps")
        if self.moments is not None:
            lines.append(repr(self.moments))
        if self.forecast is not None:
            lines.append(self.forecast.outlook)
        compared = self.pictures
        lines.append(f"evaluation: {len(compared.prompts)} prompts, {compared.steps} steps")
        if self.last_seconds is not None:
            lines.append(f"last time all of it took {timedelta(seconds=round(self.last_seconds))}")
        return lines

    @property
    def nbytes(self) -> int:
        """Bytes of the second moments and the packed directory, as far as they are known."""
        moments = self.moments.components.values() if self.moments is not None else ()
        packed = 0 if self.forecast is None else self.forecast.summary.bytes_after
        return packed + sum(found.nbytes for found in moments)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values: dict[str, Any] = {"written": False, "files": self.files}
        if self.calibration is not None:
            values["calibration"] = self.calibration.model_dump(mode="json")
        if self.moments is not None:
            values["hessians"] = self.moments.to_json()["components"]
        if self.forecast is not None:
            values["packed"] = self.forecast.to_json()
        values["evaluation"] = {"prompts": self.pictures.prompts, "steps": self.pictures.steps}
        return values


def run(
    model: ModelLike,
    *,
    recipe: RecipeLike,
    output: str | Path,
    settings: EvaluationSettings = EvaluationSettings(),  # noqa: B008  frozen
    device: str = "auto",
    force: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    commands: Sequence[str] = (),
    progress: Progress = silent,
    tell: Tell = unheard,
) -> Report | Any:
    """Calibrate, sparsify, pack and evaluate a pipeline with one recipe.

    Args:
        model: a pipeline: its directory, a hub id, or opened.
        recipe: what to do; its gates are judged.
        output: the folder to make: calibration.safetensors, hessians/ and masks.safetensors where
            the recipe asks for them, sensitivity.json and chosen.yaml where it has a budget,
            packed/ and report/.
        settings: which pictures are made, and what they are measured with; calibration takes its
            prompts too.
        device: auto, cpu or cuda[:N].
        force: replace an existing output.
        resume: go on with an output of the same run: what is complete in it is not made again,
            only the report is.
        dry_run: say what would be written, and write nothing.
        commands: what a reader types to make the report again.
        progress: told of every step.
        tell: told before the long work what will be done, a line at a time.

    Returns:
        the report; ``passed`` says whether the gates hold. With ``dry_run`` a ``RunPlan``: files,
        prompts, and the layers and bytes of what would be packed.

    Raises:
        InputError: a recipe, model, prompts or networks that cannot be used, or an output that
            exists.
        NonFiniteError: NaN or Inf in an activation or a picture.
    """
    task = _RunInputs.of(model, recipe, output, force=force or resume)
    place = choose_device(device)
    pictures = task.pictures(settings, place)
    record = task.record(settings, place)
    if dry_run:
        return task.plan(pictures, record)
    resumed = resume and task.output.exists()
    if resumed:
        record.refuse_other(task.output)
    # Before the long work: a missing network should not be found out after packing.
    backbones = settings.backbones(place)
    plan = task.plan(pictures, record)
    if not resumed and plan.forecast is not None:
        check_room(task.output, plan.nbytes)
    for line in plan.lines("goes on with" if resumed else "writes"):
        tell(line)
    started = perf_counter()
    rehearse_original(task.model, pictures, place)
    with translated(task.output):
        make_folders(task.output)
        record.write(task.output)
    with logged(task.output / LOG, progress) as heard:
        build(
            task.model,
            task.recipe,
            task.output,
            prompts=as_prompts(settings.prompts),
            device=device,
            threads=os.cpu_count() or 1,
            force=force,
            resume=resumed,
            progress=heard,
        )
        baseline = baseline_of(task.model, pictures, settings, backbones, place, progress=heard)
        report, pairs = evaluation.evaluate(
            open_pair(task.original, task.output / PACKED),
            baseline,
            limits=limits_of(task.recipe),
            title=f"{Path(task.name).name} with recipe {task.recipe.name}",
            commands=tuple(commands),
            background=task.background(settings),
            progress=heard,
        )
        replaced = force or resumed
        write = partial(write_report, report, pairs, force=replaced, pictures=settings.shown)
        write_or_keep(write, task.output / REPORT)
        update_card(task.output / PACKED, report)
    if not resumed:
        record.remember(perf_counter() - started)
    return report


@dataclass(frozen=True, eq=False)
class _RunInputs:
    #: the original as the user wrote it
    name: str
    #: as it was given: a name, or opened
    original: str | Model
    model: Model
    recipe: Recipe
    output: Path

    @classmethod
    def of(
        cls, model: ModelLike, recipe: RecipeLike, output: str | Path, *, force: bool
    ) -> "_RunInputs":
        """Open the inputs, and refuse impossible requests."""
        chosen = as_recipe(recipe)
        refuse_search(chosen)
        opened = as_model(model) if isinstance(model, Model | SingleFile) else None
        name = str(opened.path if opened else model)
        found = require_pipeline(opened or name)
        source = opened or found
        source, chosen = fitted(source, chosen, name_of(recipe))
        _check_outputs(Path(output), chosen, source, force=force)
        return cls(name, opened or name, source, chosen, Path(output))

    def pictures(self, settings: EvaluationSettings, place: torch.device) -> GenerationSettings:
        """Return the settings of pictures: a bounded number, of prompts not calibrated on."""
        prompts, seen = as_prompts(settings.prompts), self.calibrated(settings)
        if settings.count is None:
            chosen = choose_unseen(prompts, seen, device=place)
            settings = replace(settings, prompts=chosen)
        pictures = settings.pictures(place, last=True)
        if both := set(seen) & set(pictures.prompts):
            _log.warning(
                "%d of the %d prompts that are compared are calibrated on, too; give more than %d "
                "prompts",
                len(both), len(pictures.prompts), len(seen),
            )  # fmt: skip
        return pictures

    def calibrated(self, settings: EvaluationSettings) -> tuple[str, ...]:
        """Return the prompts that scales and masks are chosen on."""
        prompts = as_prompts(settings.prompts)[: self.recipe.calibration.prompts]
        return prompts if _is_calibrated(self.recipe) else ()

    def background(self, settings: EvaluationSettings) -> Background:
        """Return the artefacts of the packed pipeline once it is built."""
        file = self.output / "sensitivity.json"
        measured = (load_sensitivity(file), str(file)) if self.recipe.budget is not None else None
        ranges = None
        if self.recipe.needs_calibration:
            ranges = map_ranges(load_calibration(self.output / "calibration.safetensors"))
        seen = self.calibrated(settings)
        return Background(seen, measured, ranges, len(as_prompts(settings.prompts)) - len(seen))

    def record(self, settings: EvaluationSettings, place: torch.device) -> RunRecord:
        """Return the digests of the inputs."""
        return RunRecord.of(self.model, self.recipe, self.calibrated(settings), place.type)

    def plan(self, pictures: GenerationSettings, record: RunRecord) -> RunPlan:
        """Return the plan of the outputs."""
        chosen, source = self.recipe, self.model
        return RunPlan(
            chosen,
            self.output,
            files_of(chosen),
            chosen.calibration if _is_calibrated(chosen) else None,
            moments_of(source, chosen, memory=HESSIAN_MEMORY) if chosen.needs_hessians else None,
            None
            if chosen.budget is not None
            else forecast_pack(source, chosen, self.output / PACKED, missing=()),
            pictures,
            record.last_seconds,
        )


def _check_outputs(output: Path, recipe: Recipe, model: Model, *, force: bool) -> None:
    """Refuse outputs that could not be written, before the long work.

    Raises:
        OutputError: the folder exists without ``force``; or, with it, holds what is not replaced.
    """
    refuse_overlap(output, model.path)
    if not force:
        check_directory(output, kind="run", force=False)
    kinds = {"packed/": packing.KIND, "report/": reports.KIND, "hessians/": moment_files.KIND}
    for name in files_of(recipe):
        if name in kinds:
            # Second moments that are there are gone on with.
            if name != "hessians/" or not (output / name).exists():
                check_directory(output / name, kind=kinds[name], force=force)
        elif name != LOG:  # which is added to
            check_file(output / name, force=force)


def _is_calibrated(recipe: Recipe) -> bool:
    """Tell whether prompts are run for the recipe's choices."""
    return recipe.needs_calibration or recipe.needs_hessians


def limits_of(recipe: Recipe) -> Limits:
    """Return the recipe's gates, with the defaults where it has none."""
    default, gates = Limits(), recipe.gates
    if gates is None:
        return default
    loss = gates.clip_loss
    return Limits(
        default.ssim if gates.ssim is None else gates.ssim,
        default.lpips if gates.lpips is None else gates.lpips,
        default.clip if loss is None else loss,
        default.broken if gates.broken is None else gates.broken,
        gates.changed,
    )


def files_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the files that a run writes."""
    files = ["calibration.safetensors"] * recipe.needs_calibration
    files += ["hessians/"] * recipe.needs_hessians
    files += ["sensitivity.json", "chosen.yaml"] * (recipe.budget is not None)
    files += ["masks.safetensors"] * (recipe.sparsity is not None)
    return (*files, "packed/", "report/", LOG, RECORD)
