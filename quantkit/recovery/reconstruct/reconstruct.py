"""Recovery by reconstruction: block after block is brought to what its teacher answers.

A batch of the teacher's calls goes through the denoiser once, the student's rows beside the
teacher's. When the pass reaches a masked layer, its kept weights and its bias become those that
come nearest to what the teacher answers there, given what the student reads: what the layers before
it got wrong is part of the input, so each layer also makes up for them. When the pass leaves a
block, its layers take gradient steps together, as long as the time allows.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.errors import ArtefactError, ModelError, PromptError, QuantkitError, RecipeError
from quantkit.models.layers import Layer
from quantkit.models.source import Component
from quantkit.numerics.packing import from_rows
from quantkit.pipelines.running import choose_device, load_pipeline, quiet_libraries
from quantkit.progress import Progress
from quantkit.recovery.distill.batches import Calls, draw_calls, sample_chunks
from quantkit.recovery.distill.distributed import world_size
from quantkit.recovery.distill.early_stopping import Clock, TrainingProgress
from quantkit.recovery.distill.recover import (
    Keeping,
    Recovered,
    RecoveryTask,
    masked_layers,
    only_denoiser,
)
from quantkit.recovery.distill.resume import identify
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.trajectories import Teacher
from quantkit.recovery.reconstruct.block_file import BlockFile, ReconstructedBlock, SavedBlocks
from quantkit.recovery.reconstruct.block_finetuning import Student, Tuning
from quantkit.recovery.reconstruct.blockwise_pass import Pass
from quantkit.recovery.reconstruct.layer_fit import Fitting
from quantkit.recovery.reconstruct.time_budget import TimeBudget
from quantkit.sparsity.maskfile import LayerMask

#: Denoising steps of a trajectory. Many short ones beat few long ones: what is scarce on a CPU is
#: pictures, not timesteps, and together these meet a dozen of them.
SCHEDULES = (3, 4, 7)

#: Calls on which the denoiser's loss is told, before and after.
_JUDGED = 16

#: Of the time: trajectories stop when this share is over.
_SAMPLING_SHARE = 0.25
#: The forward passes of the calls may take this share; there are fewer calls otherwise,
_PASSING_SHARE = 0.3
#: when one takes so many times as long as the teacher did for it: both sides, and the comparisons.
_PASSES = 4
_FEWEST_CALLS = 32


def ignore(rebuilt: ReconstructedBlock) -> None:
    """Watch nothing."""
    del rebuilt


@quiet_libraries()
def reconstruct(
    task: RecoveryTask,
    settings: DistillSettings,
    *,
    progress: Progress,
    start: Mapping[str, Tensor] | None = None,
    schedules: Sequence[int] = SCHEDULES,
    watch: Callable[[ReconstructedBlock], None] = ignore,
    keeping: Keeping | None = None,
) -> Recovered:
    """Reconstruct the masked layers of a pipeline's denoiser, in one pass over its blocks.

    Nothing but the masked layers changes: their kept weights and their biases. Beside the pipeline
    in float32 are held: the masked layers once more, the activations of one forward pass of the
    calls (twice ``settings.batch`` rows), and one layer's sums or one block's gradients.

    Args:
        task: what is reconstructed, and for what.
        settings: ``batch`` calls are passed; every block takes ``steps`` gradient steps of at most
            ``rate``, or as many as its share of ``seconds`` allows.
        progress: told of blocks done.
        start: parameter name -> value of masked layers to start from, as an update by second
            moments; those not in it start as they are in the model.
        schedules: denoising steps of the sampling batches, in turn.
        watch: told of every block.
        keeping: None keeps nothing on disk.

    Raises:
        ArtefactError: no masks, masks of another model, kept blocks of another run.
        ModelError: no pipeline, more than one denoiser, a layer that cannot be reconstructed.
        NonFiniteError: NaN or Inf in what a layer reads or answers.
        PromptError: no prompts.
        QuantkitError: out of GPU memory.
        RecipeError: several processes, or packing in the forward pass.
    """
    job = _check(task, settings, start or {}, schedules)
    device = choose_device(task.device)
    # Float32 on a GPU too: sums and gradients of a block need it, and distillation is there.
    pipe = load_pipeline(task.model, device, torch.float32)
    denoiser: nn.Module = getattr(pipe, job.component.name)
    teacher = Teacher(pipe, denoiser, task.prompts, settings)
    clock = Clock()

    def report(rebuilt: ReconstructedBlock, done: int, total: int) -> None:
        progress("reconstructing blocks", done, total)
        watch(rebuilt)

    try:
        calls = _calls(teacher, settings, schedules, clock)
        weights, points, aside = job.run(denoiser, calls, clock, report, keeping)
    except torch.OutOfMemoryError as error:
        raise QuantkitError(
            f"out of GPU memory at a batch of {settings.batch}; take a smaller one, or the "
            "device cpu",
            fields=("batch", "device"),
        ) from error
    return Recovered(job.component, weights, points, teacher.made, aside)


def _calls(
    teacher: Teacher, settings: DistillSettings, schedules: Sequence[int], clock: Clock
) -> Calls:
    """Sample, and return as many calls as the time allows to pass."""
    limit = settings.seconds
    began = clock.elapsed

    def late() -> bool:
        return limit is not None and clock.elapsed > _SAMPLING_SHARE * limit

    chunks = sample_chunks(teacher, settings, schedules, late)
    count = settings.batch
    if limit is not None:
        sampled = sum(chunk.answers.shape[:2].numel() for chunk in chunks)
        seconds = _PASSES * (clock.elapsed - began) / sampled
        count = min(count, max(_FEWEST_CALLS, int(_PASSING_SHARE * limit / seconds)))
    return draw_calls(chunks, count, settings.seed)


@dataclass(frozen=True, eq=False)
class _Reconstruction:
    """A task that can be done."""

    task: RecoveryTask
    settings: DistillSettings
    component: Component
    kept: list[tuple[Layer, LayerMask]]
    start: Mapping[str, Tensor]
    schedules: Sequence[int]

    def run(
        self,
        denoiser: nn.Module,
        calls: Calls,
        clock: Clock,
        report: Callable[[ReconstructedBlock, int, int], None],
        keeping: Keeping | None,
    ) -> tuple[dict[str, Tensor], tuple[TrainingProgress, TrainingProgress], float]:
        """Return the tensors, the losses and the seconds that the clock stood still."""
        settings = self.settings
        tuning = Tuning(settings.rate, settings.steps)
        with clock.paused():  # a start by second moments takes minutes of its own
            students = self._students(denoiser)
        run = Pass(denoiser, students, Fitting(), tuning, settings.seed)
        file = self._file(keeping)
        if keeping is not None and keeping.resume and file is not None:
            kept = file.load()
            run.restore(kept.tensors, kept.blocks)
            clock, before = Clock(kept.seconds), kept.loss
        else:
            before = run.loss(calls.first(_JUDGED))

        def leave(rebuilt: ReconstructedBlock) -> None:
            report(rebuilt, len(run.rebuilt), run.total)
            if file is not None and file.due():
                blocks = tuple(run.rebuilt.values())
                file.save(SavedBlocks(run.tensors(done=True), blocks, clock.elapsed, before))

        after = run.run(calls, TimeBudget(clock, settings.seconds, run.size), leave)
        points = (
            TrainingProgress(0, before, 0.0, 0.0),
            TrainingProgress(sum(b.steps for b in run.rebuilt.values()), after, clock.elapsed, 1.0),
        )
        weights = {name: value.cpu() for name, value in run.tensors(done=False).items()}
        return weights, points, clock.paused_for

    def _file(self, keeping: Keeping | None) -> BlockFile | None:
        if keeping is None:
            return None
        task = self.task
        identity = identify(self.component, task.masks, None, self.settings, task.prompts)
        return BlockFile(
            keeping.path,
            identity | {"start": sorted(self.start), "schedules": list(self.schedules)},
            keeping.every,
        )

    def _students(self, denoiser: nn.Module) -> dict[str, Student]:
        """Return the student's layers, their dropped weights zero."""
        return {
            layer.name: _student(
                denoiser, layer, from_rows(mask.dense(layer.n, layer.k), layer.shape), self.start
            )
            for layer, mask in self.kept
        }


@torch.no_grad()
def _student(
    denoiser: nn.Module, layer: Layer, mask: Tensor, start: Mapping[str, Tensor]
) -> Student:
    try:
        teacher = denoiser.get_submodule(layer.name)
    except AttributeError as error:
        raise ModelError(
            f"{layer.name}: the model that diffusers builds has no such module"
        ) from error
    _refuse_other(layer.name, teacher)
    copied = copy.deepcopy(teacher).requires_grad_(False)
    for part, value in copied.named_parameters():
        name = f"{layer.name}.{part}"
        if name in start:
            value.copy_(start[name])
    weight = copied.get_parameter("weight")
    mask = mask.to(weight.device)
    weight.mul_(mask)
    return Student(copied, mask)


def _refuse_other(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        return
    if isinstance(module, nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros":
        return
    raise ModelError(
        f"{name}: found {module}, wanted a Linear or a Conv2d of one group padded with zeros; "
        "choose masks without it"
    )


def _check(
    task: RecoveryTask,
    settings: DistillSettings,
    start: Mapping[str, Tensor],
    schedules: Sequence[int],
) -> _Reconstruction:
    if not task.prompts:
        raise PromptError("no prompts, wanted at least one")
    if task.quantize is not None:
        raise RecipeError(
            "quantize: reconstruct fits layers in 16 bit only; drop it", fields=("quantize",)
        )
    if world_size() > 1:
        raise RecipeError(
            f"reconstruct: runs in one process, and {world_size()} were started; start it without "
            "torchrun"
        )
    component = only_denoiser(task.model)
    kept = [] if task.masks is None else masked_layers(component, task.masks)
    if not kept:
        raise ArtefactError("masks: no layer is masked, so there is nothing to reconstruct")
    return _Reconstruction(task, settings, component, kept, start, schedules)
