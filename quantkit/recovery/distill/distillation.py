"""Recovery by distillation: a student of fewer bits or weights, trained on the dense outputs."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.component import PackedComponent
from quantkit.checkpoint.reader import Packed
from quantkit.errors import ArtefactError, ModelError, PromptError, RecipeError
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.source import Component, Model
from quantkit.numerics.packed_2to4 import from_rows
from quantkit.pipelines.running import choose_device, load_pipeline, quiet_libraries
from quantkit.progress import Progress
from quantkit.recovery.distill.distributed import Ranks, joined, own_device
from quantkit.recovery.distill.optimizer import Offloaded, Resident, Stepper
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.student_training import Trainer
from quantkit.recovery.distill.training_progress import (
    ScoredStep,
    TrainingProgress,
    ValidationScore,
)
from quantkit.recovery.distill.training_resume import Checkpoint, identify
from quantkit.recovery.distill.trajectories import Teacher
from quantkit.recovery.distill.validation import Pictures, PictureWatcher, Viewer, hold_out
from quantkit.recovery.packed_training import install, packed_tensors
from quantkit.sparsity.maskfile import LayerMask, MaskSet
from quantkit.storage.digest import sha256_of


@dataclass(frozen=True, eq=False)
class RecoveryTask:
    """The subject and the target format of a training."""

    #: a pipeline with one denoiser
    model: Model
    #: masks of the kept weights, chosen for this model; None: all are kept
    masks: MaskSet | None
    #: the model as it is packed, whose denoiser is trained; None: the 16-bit one is
    packed: Packed | None
    #: taken in turn, with a new seed each time. Any number; thousands are better
    prompts: Sequence[str]
    #: auto, cpu or cuda[:N]; bfloat16 autocast on a GPU, float32 on the CPU
    device: str


@dataclass(frozen=True, eq=False)
class SaveSettings:
    """The file that a training is saved to, and how often."""

    path: Path
    #: seconds after which it is saved again
    every: float
    #: go on with the training that is there
    resume: bool = False


@dataclass(frozen=True, eq=False)
class Recovered:
    """The trained weights of a model's denoiser."""

    component: Component
    #: parameter name -> float32 on the CPU, exactly zero where a mask does not keep; of a packed
    #: denoiser the name of a tensor in its files -> its codes, or float32
    weights: Mapping[str, Tensor]
    #: the loss on the way
    points: tuple[TrainingProgress, ...]
    #: sampled from the teacher, by all processes
    trajectories: int
    #: seconds of looks, saving and refilling, which the points leave out
    aside: float
    #: whether this process is the one of several that writes
    writes: bool = True
    #: the pictures before the first step; None: not looked at
    first_look: ScoredStep | None = None
    #: the pictures of ``weights``; None: not looked at
    written_look: ScoredStep | None = None


@dataclass(frozen=True, eq=False)
class Look:
    """The student's and the teacher's pictures at one step: (P, H, W, 3) in [0, 1]."""

    step: int
    prompts: tuple[str, ...]
    found: Pictures
    expected: Pictures
    score: ValidationScore


def ignore(news: TrainingProgress | Look) -> None:
    """Watch nothing."""
    del news


@quiet_libraries()
def recover(
    task: RecoveryTask,
    settings: DistillSettings,
    *,
    progress: Progress,
    watch: Callable[[TrainingProgress], None] = ignore,
    show: Callable[[Look], None] = ignore,
    save: SaveSettings | None = None,
) -> Recovered:
    """Train the denoiser of a pipeline on the dense one's own trajectories.

    The dense pipeline denoises the prompts from noise, and every call of its denoiser becomes an
    example: what it was asked, and what it answered. With guidance half of these calls are without
    a caption. The student starts from the masked weights; its masks stay as they are. Processes
    that ``torchrun`` or ``accelerate launch`` started train one student together.

    Args:
        task: what is trained, and for what.
        settings: how long and how fast.
        progress: told of percents of the training.
        watch: told of the loss.
        show: told the pictures of every look, and of two more: before the first step and after the
            last.
        save: None keeps nothing on disk.

    Raises:
        ArtefactError: neither masks nor a packed denoiser, or both, or of another model; a saved
            training that does not fit.
        ModelError: no pipeline, or more than one denoiser.
        NonFiniteError: the loss became NaN or Inf.
        PromptError: no prompts.
        RecipeError: a recipe that cannot be trained, or offloading from a CPU.
    """
    if not task.prompts:
        raise PromptError("no prompts, expected at least one")
    component = only_denoiser(task.model)
    kept = [] if task.masks is None else masked_layers(component, task.masks)
    _refuse_nothing(task, kept)
    packed = packed_denoiser(task.packed, component)
    target = own_device(choose_device(task.device))
    if settings.offload and target.type == "cpu":
        raise RecipeError("offload: needs a GPU, and this is the CPU; drop it", fields=("offload",))
    with joined(target) as ranks:
        recruit = _CheckedTask(task, component, kept, packed, settings)
        return recruit.train(target, ranks, _Listeners(progress, watch, show), save)


@dataclass(frozen=True, eq=False)
class _Listeners:
    """The listeners of a training."""

    progress: Progress
    watch: Callable[[TrainingProgress], None]
    show: Callable[[Look], None]


@dataclass(frozen=True, eq=False)
class _CheckedTask:
    """A checked task."""

    task: RecoveryTask
    component: Component
    kept: list[tuple[Layer, LayerMask]]
    packed: PackedComponent | None
    settings: DistillSettings

    def train(
        self,
        device: torch.device,
        ranks: Ranks,
        audience: _Listeners,
        save: SaveSettings | None,
    ) -> Recovered:
        prompts, watched = hold_out(self.task.prompts, self.settings.watched)
        pipe = load_pipeline(self.task.model, device)
        denoiser: nn.Module = getattr(pipe, self.component.name)
        teacher = Teacher(pipe, denoiser, prompts, self.settings, ranks)
        student, stepper = self._student(denoiser, ranks)
        # Before the watcher copies the denoiser, so that an offloaded copy is not on the GPU.
        teacher.rest()
        progress, gallery = audience.progress, _Gallery(watched, audience.show)
        watcher = self._watcher(teacher, watched, gallery.see) if ranks.writes else None
        with closing(stepper):
            trainer = Trainer(student, stepper, teacher, self.settings, ranks)
            saver = self._keep(trainer, save, ranks)

            gallery.trainer = trainer

            def report(point: TrainingProgress) -> None:
                progress("recovering", round(100 * point.fraction), 100)
                audience.watch(point)

            progress("recovering", 0, 100)
            start = gallery.look(watcher, stepper.average)
            # One that goes on holds the look of its first step.
            trainer.first_look = trainer.first_look or start
            best = trainer.run(report if ranks.writes else ignore, watcher, saver)
            if saver is not None:
                # A last look that fails, or a full disk, should not cost the training.
                saver.save(trainer)
            written = trainer.written_look or gallery.look(watcher, best)
            progress("recovering", 100, 100)
            weights = self._written(student, best)
        return Recovered(
            self.component,
            weights,
            tuple(trainer.points),
            teacher.made * ranks.world,
            trainer.clock.paused_for,
            ranks.writes,
            trainer.first_look,
            written,
        )

    def _student(self, denoiser: Any, ranks: Ranks) -> tuple[nn.Module, Stepper]:
        """Return a copy that can be trained; dropout stays off, as where pictures are made."""
        offload = self.settings.offload
        student: Any = self._copy(denoiser, torch.bfloat16 if offload else torch.float32)
        student.requires_grad_(True).eval()
        if self.settings.checkpointing or offload:
            student.enable_gradient_checkpointing()
        _refuse_unknown(student, [layer.weight.name for layer, _ in self.kept], self.component)
        device = torch.device("cpu") if offload else next(student.parameters()).device
        dense = {
            layer.weight.name: from_rows(mask.dense(layer.n, layer.k), layer.shape).to(device)
            for layer, mask in self.kept
        }
        if offload:
            source = self._copy(denoiser, torch.float32)
            return student, Offloaded(student, source, dense, self.settings, ranks)
        return student, Resident(student, dense, self.settings, ranks)

    def _copy(self, denoiser: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Return a copy with the parameters that are trained; those of codes are float32."""
        copied = copy.deepcopy(denoiser).to(dtype)
        if self.packed is not None:
            install(copied, self.packed)
        return copied

    def _written(self, student: nn.Module, best: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is to be written of the best parameters, on the CPU."""
        weights = {name: value.cpu() for name, value in best.items()}
        if self.packed is None:
            return weights
        student.cpu()
        for name, parameter in student.named_parameters():
            parameter.data = weights[name]
        return dict(packed_tensors(student))

    def _watcher(
        self, teacher: Teacher, prompts: Sequence[str], viewer: Viewer
    ) -> PictureWatcher | None:
        if self.settings.watch_every is None:
            return None
        dense: nn.Module = getattr(teacher.pipe, self.component.name)
        probe = self._copy(dense, next(dense.parameters()).dtype)
        watcher = PictureWatcher(teacher, self.component.name, prompts, self.settings, probe)
        watcher.viewer = viewer
        return watcher

    def _keep(self, trainer: Trainer, save: SaveSettings | None, ranks: Ranks) -> Checkpoint | None:
        """Return the checkpoint of this process, with the last saved training restored."""
        if save is None:
            return None
        task = self.task
        identity = identify(self.component, task.masks, self.packed, self.settings, task.prompts)
        checkpoint = Checkpoint(save.path, identity | {"world": ranks.world}, save.every)
        if save.resume:
            checkpoint.resume(trainer)
        return checkpoint if ranks.writes else None


class _Gallery:
    """Shows the pictures of a watcher with the step; also looks at the beginning and the end."""

    def __init__(self, prompts: Sequence[str], show: Callable[[Look], None]) -> None:
        self.trainer: Trainer | None = None
        self._prompts, self._show = tuple(prompts), show

    def see(self, found: Pictures, expected: Pictures, score: ValidationScore) -> None:
        """Take the pictures of a look."""
        assert self.trainer is not None, "set before anybody looks"
        self._show(Look(self.trainer.step, self._prompts, found, expected, score))

    def look(
        self, watcher: PictureWatcher | None, weights: Mapping[str, Tensor]
    ) -> ScoredStep | None:
        """Look at this step's pictures; the training's clock stands still."""
        assert self.trainer is not None, "set before anybody looks"
        if watcher is None:
            return None
        with self.trainer.clock.paused():
            return ScoredStep(self.trainer.step, watcher.look(weights))


def _refuse_nothing(task: RecoveryTask, kept: Sequence[object]) -> None:
    """Refuse a task without anything to recover from, or with too much.

    Raises:
        ArtefactError: no masked layer and no packed model, or masks and a packed model.
    """
    if task.packed is None and not kept:
        raise ArtefactError(
            "masks: no layer is masked, and nothing is packed, so there is nothing to recover; "
            "give masks of 'quantkit sparsify', or packed, a directory of 'quantkit pack'",
            fields=("masks", "packed"),
        )
    if task.packed is not None and task.masks is not None:
        raise ArtefactError(
            "masks: given with a packed model, whose zeros stay as they are; drop them",
            fields=("masks",),
        )


def packed_denoiser(packed: Packed | None, component: Component) -> PackedComponent | None:
    """Return the denoiser of a packed model; None where there is no packed model.

    Raises:
        ArtefactError: its denoiser is not packed, or another class than that of the model.
    """
    if packed is None:
        return None
    found = {c.name: c for c in packed.components}.get(component.name)
    if found is None or found.class_name != component.class_name:
        has = ", ".join(f"{c.name} ({c.class_name})" for c in packed.components)
        raise ArtefactError(
            f"{packed.path}: packs {has}, expected {component.name} ({component.class_name}); give "
            "what was packed from this model",
            fields=("packed",),
        )
    return found


def only_denoiser(model: Model) -> Component:
    """Return the denoiser of a pipeline that has one.

    Raises:
        ModelError: no pipeline, or more than one denoiser.
    """
    if not model.is_pipeline:
        raise ModelError(
            f"{model.path}: a component alone, and recovery runs the whole pipeline; pass the "
            "pipeline's directory"
        )
    if len(model.components) != 1:
        names = ", ".join(component.name for component in model.components)
        raise ModelError(
            f"{model.path}: found the denoisers {names}, and recovery can only train a pipeline "
            "with one"
        )
    return model.components[0]


def masked_layers(component: Component, masks: MaskSet) -> list[tuple[Layer, LayerMask]]:
    """Return the layers that have a mask.

    Raises:
        ArtefactError: a layer that is not there, or weights that the masks are not for.
    """
    chosen = masks.of(component)
    layers = {layer.name: layer for layer in list_layers(component)}
    for name, mask in chosen.items():
        if name not in layers:
            raise ArtefactError(
                f"masks: {name} is not a layer of {component.path}; choose masks for this model"
            )
        digest = sha256_of(layers[name].shard, layers[name].weight)
        if digest != mask.source_digest:
            raise ArtefactError(
                f"masks: {name} had other weights (checksum {digest[:12]} now, "
                f"{mask.source_digest[:12]} then); choose masks for this model"
            )
    return [(layers[name], mask) for name, mask in chosen.items()]


def _refuse_unknown(student: nn.Module, masks: Sequence[str], component: Component) -> None:
    names = {name for name, _ in student.named_parameters()}
    for name in masks:
        if name not in names:
            raise ModelError(
                f"{component.path}: the model that diffusers builds has no parameter {name}"
            )
