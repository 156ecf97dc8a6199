"""Taking second moments: the prompts run once for every group of layers that fits in memory."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.moments.held_out_rows import HELD_ROWS, held_count, hold_out
from quantkit.calibration.moments.moment_collector import MomentCollector
from quantkit.calibration.moments.moment_files import HessianIndex, Hessians, create_hessians
from quantkit.calibration.moments.moments import group_layers
from quantkit.calibration.moments.shared_moments import UnsharedInputError
from quantkit.calibration.observing.collect import layers_to_pack
from quantkit.errors import OutputError, PromptError, QuantkitError
from quantkit.models.component_layers import Layer
from quantkit.models.source import Component, Model
from quantkit.models.treated import others_of
from quantkit.pipelines.own_inputs import OwnInputs
from quantkit.pipelines.running import (
    choose_device,
    encode_prompts,
    load_pipeline,
    quiet_libraries,
    refuse_component,
    rehearse_prompts,
    run_prompts,
)
from quantkit.progress import Progress
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.schema import Recipe
from quantkit.storage.digest import sha256_of

#: A prompt is encoded once, in a few hundred rows: all of them are looked at.
_ENCODING = {"row_share": 1.0}


def collect_hessians(
    model: Model,
    recipe: Recipe,
    prompts: Sequence[str],
    output: Path,
    *,
    memory: float,
    device: str,
    progress: Progress,
    force: bool = False,
) -> Hessians:
    """Run the pipeline on prompts and store the second moments of the layers that may need them.

    Prompts are denoised for denoisers, and only encoded for text encoders.

    Layers that have their file already are not observed again, so a killed run goes on.

    Args:
        model: a pipeline.
        recipe: its calibration section says how to run; what it keeps in 16 bit is not observed.
        prompts: the first ``recipe.calibration.prompts`` are used.
        output: the directory; made, or gone on with.
        memory: bytes that the matrices of one group may take, beside the pipeline.
        device: auto, cpu or cuda[:N]; float32 on the CPU, else the 16-bit dtype of the weights.
        progress: told of denoiser calls, by group.
        force: begin again where there is such a directory.

    Raises:
        ModelError: MODEL is one component, or diffusers cannot load it.
        NonFiniteError: NaN or Inf in an activation; the text names the layer.
        OutputError: the directory holds something else, or cannot be written; what it has stays.
        PromptError: no prompts.
        RecipeError: a layer that does not fit, a scheduler whose steps cannot be weighed.
    """
    chosen = tuple(prompts[: recipe.calibration.prompts])
    if not chosen:
        raise PromptError("no prompts, expected at least one")
    refuse_component(model)
    place = choose_device(device)
    layers = moment_layers(model, recipe)
    for found in layers.values():
        group_layers(found, memory)
    hessians = create_hessians(output, _index(recipe, chosen, layers), force=force)
    missing = set(hessians.missing)
    groups = [
        (name, group)
        for name, found in layers.items()
        for group in group_layers([x for x in found if (name, x.name) in missing], memory)
    ]
    if groups:
        with quiet_libraries():
            pipe = load_pipeline(model, place)
            denoisers = tuple(component.name for component in model.components)
            denoises = any(name in denoisers for name, _ in groups)
            inputs = rehearse_prompts(pipe, chosen, recipe.calibration, denoises=denoises)
            run = _MomentRun(pipe, denoisers, chosen, recipe.calibration, hessians, inputs)
            for done, (name, group) in enumerate(groups, 1):
                step = f"hessians of {name}, group {done} of {len(groups)}"
                run.observe(name, group, step, progress)
    return Hessians(hessians.path, hessians.index)


def moment_layers(model: Model, recipe: Recipe) -> dict[str, tuple[Layer, ...]]:
    """Return the layers whose second moments are taken, by component.

    Of denoisers all that are packed, unless nothing but text encoders is rounded by GPTQ: those of
    a denoiser are many times larger. Of text encoders the layers that are.

    Args:
        model: a pipeline, or a component.
        recipe: what is packed, and how.
    """
    layers = {encoder.name: _rounded(encoder, own) for encoder, own in others_of(model, recipe)}
    layers = {name: found for name, found in layers.items() if found}
    if layers and not recipe.denoisers_need_hessians:
        return layers
    return {c.name: layers_to_pack(c, recipe) for c in model.components} | layers


def _rounded(encoder: Component, recipe: Recipe) -> tuple[Layer, ...]:
    """Return the layers of a text encoder that are rounded by GPTQ."""
    return tuple(
        layer
        for layer in layers_to_pack(encoder, recipe)
        if recipe.settings(layer.name).weight.rounding == "gptq"
    )


def _index(
    recipe: Recipe, prompts: Sequence[str], layers: dict[str, tuple[Layer, ...]]
) -> HessianIndex:
    settings = recipe.calibration
    return HessianIndex(
        digests={
            name: {layer.name: sha256_of(layer.shard, layer.weight) for layer in found}
            for name, found in layers.items()
        },
        recipe=recipe.name,
        prompts=len(prompts),
        held_out=held_count(len(prompts)),
        prompts_digest=hashlib.sha256("\n".join(prompts).encode()).hexdigest(),
        steps=settings.steps,
        guidance=settings.guidance,
        seed=settings.seed,
        batch=settings.batch,
        weighting=settings.weighting,
        row_share=settings.row_share,
        versions={name: version(name) for name in ("quantkit", "torch", "diffusers")},
    )


@dataclass(frozen=True)
class _MomentRun:
    """The prompts, and how they are run."""

    pipe: Any
    #: names of its components
    denoisers: tuple[str, ...]
    prompts: Sequence[str]
    settings: CalibrationRecipe
    hessians: Hessians
    inputs: OwnInputs | None = None

    def observe(
        self, component: str, group: Sequence[Layer], step: str, progress: Progress
    ) -> None:
        """Run the prompts once with a group of layers observed, and store what they read."""
        encodes = component not in self.denoisers
        settings = self.settings.model_copy(update=_ENCODING if encodes else {})
        scheduler = None if encodes else self.pipe.scheduler
        # Held rows judge smoothing, of which text encoders have none.
        fitted, held = (self.prompts, ()) if encodes else hold_out(self.prompts)
        later = settings.model_copy(update={"seed": settings.seed + len(fitted)})
        batches = sum(-(-len(prompts) // settings.batch) for prompts in (fitted, held))

        def report(calls: int) -> None:
            total = batches * (1 if scheduler is None else len(scheduler.timesteps))
            progress(step, min(calls, total), total)

        others = [getattr(self.pipe, n) for n in self.denoisers if not encodes and n != component]

        def collected(*, share: bool) -> MomentCollector:
            model = getattr(self.pipe, component)
            collector = MomentCollector(component, model, group, settings, share=share)
            with collector.attached(scheduler, report, others):
                if encodes:
                    encode_prompts(self.pipe, self.denoisers, fitted, settings, self.inputs)
                else:
                    run_prompts(self.pipe, fitted, settings, collector.begin_batch, self.inputs)
                if held:
                    collector.hold_out(-(-HELD_ROWS // (len(held) * settings.steps)))
                    run_prompts(self.pipe, held, later, collector.begin_batch, self.inputs)
            return collector

        def shared_or_not() -> MomentCollector:
            # Out of the error's reach, which would keep the first sums in memory.
            with suppress(UnsharedInputError):
                return collected(share=True)
            return collected(share=False)

        try:
            collector = shared_or_not()
        except torch.OutOfMemoryError as error:
            raise QuantkitError(
                f"out of GPU memory while {'encoding' if encodes else 'denoising'}; take a smaller "
                "batch, less memory for the matrices, or the device cpu",
                fields=("batch", "memory", "device"),
            ) from error
        try:
            for layer in group:
                self.hessians.write(component, layer.name, collector.moments(layer.name))
        except OutputError as error:
            raise OutputError(f"{error}; {self.how_to_go_on()}") from error

    def how_to_go_on(self) -> str:
        """Return what to do after the disk was full."""
        left = len(Hessians(self.hessians.path, self.hessians.index).missing)
        return f"{left} layers are left: run the same command without force to go on"
