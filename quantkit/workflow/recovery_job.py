"""The methods of a recovery, on opened inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.reader import Packed
from quantkit.errors import ArtefactError
from quantkit.eval.pages.course import CourseFacts, CoursePage
from quantkit.models.source import Model
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, Tell
from quantkit.recipe.schema import Recipe
from quantkit.recovery.distill import distillation as distilling
from quantkit.recovery.distill.training_progress import TrainingProgress
from quantkit.recovery.distill.training_resume import refuse_unfinished
from quantkit.recovery.obs_update import UpdatedTensors
from quantkit.recovery.recovered_model import refuse_outputs, write_recovered
from quantkit.recovery.trained_checkpoint import refuse_output, write_trained
from quantkit.sparsity.maskfile import MaskSet
from quantkit.sparsity.sparsegpt import Surgeon
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import refuse_file
from quantkit.workflow.arguments import PromptsLike, as_prompts
from quantkit.workflow.recovery_result import Recovery
from quantkit.workflow.recovery_settings import Training, settings_of

#: Seconds after which a training is saved again.
_SAVED_EVERY = 600.0


@dataclass(frozen=True, eq=False)
class Job:
    """The opened inputs and all settings of a recovery."""

    model: Model
    recipe: Recipe
    masks: MaskSet | None
    #: trained in place of a 16-bit pipeline; None: there is none
    packed: Packed | None
    surgeon: Surgeon | None
    prompts: PromptsLike | None
    training: Training
    output: Path
    masks_output: Path | None
    device: str
    force: bool
    progress: Progress
    tell: Tell
    #: the commands that reproduce it
    commands: tuple[str, ...] = ()

    @property
    def where(self) -> Path | None:
        """The path of the masks; None: there are none."""
        return None if self.masks is None else self.masks_path

    @property
    def masks_path(self) -> Path:
        """The path for masks: next to the pipeline by default."""
        return self.masks_output or self.output.with_name(f"{self.output.name}.masks.safetensors")

    @property
    def file(self) -> Path:
        """The file of the saved training."""
        return self.output.with_name(f"{self.output.name}.recovery.safetensors")

    @property
    def page(self) -> Path:
        """The page of the pictures during training."""
        return self.output.with_name(f"{self.output.name}.recovery.html")

    @property
    def save(self) -> distilling.SaveSettings:
        """The file of the saved training, and how often it is written."""
        return distilling.SaveSettings(self.file, _SAVED_EVERY, self.training.resume)

    def refuse(self) -> None:
        """Refuse outputs that cannot be, before anything long begins."""
        if self.packed is None:
            refuse_outputs(self.model, self.output, self.where, force=self.force)
        else:
            refuse_output(self.packed, self.output, force=self.force)

    def write(self, method: str, recovered: distilling.Recovered) -> Recovery:
        """Write the pipeline and its masks, or the packed model, and say how it went."""
        write_or_keep(lambda path: self._write(recovered, path), self.output)
        return Recovery(
            method,
            self.output,
            self.where,
            len(recovered.weights),
            recovered.points,
            recovered.trajectories,
            recovered.aside,
            recovered.first_look,
            recovered.written_look,
        )

    def _write(self, recovered: distilling.Recovered, path: Path) -> None:
        if self.packed is not None:
            name = recovered.component.name
            write_trained(self.packed, name, recovered.weights, path, force=self.force)
            return
        where = self.where
        masks_at = where if where is None or path == self.output else path.with_name(where.name)
        write_recovered(self.model, self.masks, recovered, path, masks_at, force=self.force)


def _distill(job: Job) -> Recovery | None:
    job.refuse()
    refuse_unfinished(job.file, resume=job.training.resume, force=job.force)
    refuse_file(job.page, force=job.force or job.training.resume)
    on_cpu = choose_device(job.device).type == "cpu"
    settings = settings_of(job.training, job.recipe.calibration, on_cpu=on_cpu)
    task = distilling.RecoveryTask(
        job.model, job.masks, job.packed, as_prompts(job.prompts), job.device
    )
    page = CoursePage(job.page, CourseFacts(job.output.name, job.commands))
    tell = _points_to(job.tell)

    def watch(point: TrainingProgress) -> None:
        tell(point)
        page.follow(point)

    with page.open():
        recovered = distilling.recover(
            task, settings, progress=job.progress, watch=watch, show=page.show, save=job.save
        )
        if recovered.written_look is not None:
            page.name_written(recovered.written_look.step)
        return _finished(job, "distill", recovered) if recovered.writes else None


def _obs(job: Job) -> Recovery | None:
    if job.masks is None:
        raise ArtefactError(
            "masks: missing, and method obs needs them; give those of 'quantkit sparsify', or a "
            "recipe with a sparsity section",
            fields=("masks",),
        )
    job.refuse()
    component = distilling.only_denoiser(job.model)
    assert job.surgeon is not None, "refused before"
    updated = UpdatedTensors(component, job.masks, job.surgeon)
    recovered = distilling.Recovered(component, updated, (), trajectories=0, aside=0.0)
    return job.write("obs", recovered)


def _finished(job: Job, method: str, recovered: distilling.Recovered) -> Recovery:
    """Write the result, and delete the saved training."""
    result = job.write(method, recovered)
    job.file.unlink(missing_ok=True)
    return result


#: What a process of several that has nothing to write returns is None.
RUN: dict[str, Callable[[Job], Recovery | None]] = {
    "distill": _distill,
    "obs": _obs,
}


def _points_to(tell: Tell) -> Callable[[TrainingProgress], None]:
    """Return a watcher that tells of looks, and of the loss at every twentieth of the training."""
    due = 0.0

    def show(point: TrainingProgress) -> None:
        nonlocal due
        if point.fraction < due and point.look is None:
            return
        due = max(due, point.fraction + 0.05)
        seen = "" if point.look is None else f", {point.look.metric} {point.look.value:.4f}"
        tell(f"step {point.step}: loss {point.loss:.5f}{seen}, {point.seconds:.0f} s")

    return show
