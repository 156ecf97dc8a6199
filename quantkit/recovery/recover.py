"""Recovery by distillation: the student is the dense model with masks, trained on its answers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantkit.calibration.running import choose_device, load_pipeline, quiet_libraries
from quantkit.digest import sha256_of
from quantkit.errors import ArtefactError, ModelError, PromptError
from quantkit.models.layers import Layer, list_layers
from quantkit.models.source import Component, Model
from quantkit.numerics.packing import from_rows
from quantkit.progress import Progress
from quantkit.recovery.bank import Teacher
from quantkit.recovery.settings import Settings
from quantkit.recovery.training import Point, Trainer
from quantkit.sparsity.maskfile import LayerMask, MaskSet


@dataclass(frozen=True, eq=False)
class Recovered:
    """The trained weights of a model's denoiser."""

    component: Component
    #: parameter name -> float32 on the CPU; exactly zero where a mask does not keep
    weights: Mapping[str, Tensor]
    #: the loss on the way
    points: tuple[Point, ...]
    #: sampled from the teacher
    trajectories: int


def ignore(point: Point) -> None:
    """Watch nothing."""
    del point


@quiet_libraries()
def recover(
    model: Model,
    masks: MaskSet,
    settings: Settings,
    *,
    prompts: Sequence[str],
    device: str,
    progress: Progress,
    watch: Callable[[Point], None] = ignore,
) -> Recovered:
    """Train the masked denoiser of a pipeline on the dense one's own trajectories.

    The dense pipeline denoises the prompts from noise, and every call of its denoiser becomes an
    example: what it was asked, and what it answered. With guidance half of these calls are without
    a caption. The student starts from the masked weights; its masks stay as they are.

    Args:
        model: a pipeline with one denoiser.
        masks: which weights are kept, chosen for this model.
        settings: how long and how fast.
        prompts: taken in turn, with a new seed each time. Any number; thousands are better.
        device: auto, cpu or cuda[:N]; bfloat16 autocast on a GPU, float32 on the CPU.
        progress: told of percents of the training.
        watch: told of the loss.

    Raises:
        ArtefactError: no masks, or masks of another model.
        ModelError: no pipeline, or more than one denoiser.
        NonFiniteError: the loss became NaN or Inf.
        PromptError: no prompts.
    """
    if not prompts:
        raise PromptError("no prompts, wanted at least one")
    component = only_denoiser(model)
    kept = _masked_layers(component, masks)
    target = choose_device(device)
    pipe = load_pipeline(model, target)
    denoiser: nn.Module = getattr(pipe, component.name)
    student = _copy(denoiser, settings)
    shapes = {f"{layer.name}.weight": mask for layer, mask in kept}
    _refuse_unknown(student, shapes, component)
    teacher = Teacher(pipe, denoiser, prompts, settings)
    dense = {
        f"{layer.name}.weight": from_rows(mask.dense(layer.n, layer.k), layer.shape).to(target)
        for layer, mask in kept
    }
    trainer = Trainer(student, dense, teacher, settings)

    def report(point: Point) -> None:
        progress("recovering", round(100 * point.fraction), 100)
        watch(point)

    progress("recovering", 0, 100)
    points = trainer.run(report)
    progress("recovering", 100, 100)
    weights = {name: value.cpu() for name, value in trainer.average.items()}
    return Recovered(component, weights, tuple(points), teacher.made)


def only_denoiser(model: Model) -> Component:
    """Return the denoiser of a pipeline that has one.

    Raises:
        ModelError: no pipeline, or more than one denoiser.
    """
    if not model.is_pipeline:
        raise ModelError(
            f"{model.path}: one component; recovery runs the whole pipeline, pass its directory"
        )
    if len(model.components) != 1:
        names = ", ".join(component.name for component in model.components)
        raise ModelError(f"{model.path}: found the denoisers {names}; recovery trains one")
    return model.components[0]


def _masked_layers(component: Component, masks: MaskSet) -> list[tuple[Layer, LayerMask]]:
    """Return the layers that have a mask.

    Raises:
        ArtefactError: none, a layer that is not there, or weights that the masks are not for.
    """
    chosen = masks.of(component)
    layers = {layer.name: layer for layer in list_layers(component)}
    if not chosen:
        raise ArtefactError("masks: no layer is masked, so there is nothing to recover")
    for name, mask in chosen.items():
        if name not in layers:
            raise ArtefactError(f"masks: {name} is no layer of {component.path}; choose them again")
        digest = sha256_of(layers[name].shard, layers[name].weight)
        if digest != mask.source_digest:
            raise ArtefactError(
                f"masks: {name} had other weights (checksum {digest[:12]} now, "
                f"{mask.source_digest[:12]} then); choose masks for this model"
            )
    return [(layers[name], mask) for name, mask in chosen.items()]


def _copy(denoiser: Any, settings: Settings) -> nn.Module:
    """Return a float32 copy that can be trained; dropout stays off, as where pictures are made."""
    student: Any = copy.deepcopy(denoiser).float().requires_grad_(True).eval()
    if settings.checkpointing:
        student.enable_gradient_checkpointing()
    module: nn.Module = student
    return module


def _refuse_unknown(student: nn.Module, masks: Mapping[str, Any], component: Component) -> None:
    names = {name for name, _ in student.named_parameters()}
    for name in masks:
        if name not in names:
            raise ModelError(f"{component.path}: diffusers builds no parameter {name}")
