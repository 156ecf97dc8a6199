"""Calibrating: run a pipeline on prompts and keep the statistics of what its layers read."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch

from quantkit.calibration.hooks import Collector
from quantkit.calibration.running import (
    choose_device,
    load_pipeline,
    quiet_libraries,
    read_prompts,
    run_batch,
    split_batches,
)
from quantkit.calibration.statistics import Calibration, Provenance
from quantkit.digest import sha256_of
from quantkit.errors import PromptError, QuantkitError
from quantkit.models.layers import Layer, list_layers
from quantkit.models.plan import kept_reason
from quantkit.models.source import Component, Model
from quantkit.progress import Progress
from quantkit.recipe import CalibrationRecipe, Recipe

__all__ = ["calibrate", "observed_layers", "read_prompts"]


def calibrate(
    model: Model, recipe: Recipe, prompts: Sequence[str], *, device: str, progress: Progress
) -> Calibration:
    """Run the pipeline on prompts and return the statistics of every layer that can be packed.

    Args:
        model: a pipeline.
        recipe: its calibration section says how to run; what it keeps in 16 bit is not observed.
        prompts: the first ``recipe.calibration.prompts`` are used.
        device: auto, cpu or cuda[:N]; float32 on the CPU, else the 16-bit dtype of the weights.
        progress: told of weights hashed and of denoiser calls.

    Raises:
        ModelError: MODEL is one component, or diffusers cannot load it.
        NonFiniteError: NaN or Inf in an activation; the text names layer and step.
        PromptError: no prompts.
        RecipeError: more buckets than steps.
    """
    settings = recipe.calibration
    chosen = tuple(prompts[: settings.prompts])
    if not chosen:
        raise PromptError("no prompts, wanted at least one")
    layers = {c.name: observed_layers(c, recipe) for c in model.components}
    target = choose_device(device)
    with quiet_libraries():
        collectors = _run(load_pipeline(model, target), layers, chosen, settings, progress)
    provenance = Provenance(
        digests=_digests(layers, progress),
        recipe=recipe.name,
        prompts=len(chosen),
        prompts_digest=hashlib.sha256("\n".join(chosen).encode()).hexdigest(),
        steps=settings.steps,
        guidance=settings.guidance,
        seed=settings.seed,
        calls={collector.name: collector.calls for collector in collectors},
        versions={name: version(name) for name in ("quantkit", "torch", "diffusers")},
    )
    statistics = {collector.name: collector.statistics() for collector in collectors}
    # Denoisers of one pipeline share its scheduler, so the first one's edges are everyone's.
    return Calibration(statistics, collectors[0].edges or (), provenance)


def observed_layers(component: Component, recipe: Recipe) -> tuple[Layer, ...]:
    """Return the layers whose input is observed: all that the plan does not keep in 16 bit."""
    return tuple(
        layer
        for layer in list_layers(component)
        if kept_reason(layer, component.family, recipe) is None
    )


def _run(
    pipe: Any,
    layers: Mapping[str, Sequence[Layer]],
    prompts: Sequence[str],
    settings: CalibrationRecipe,
    progress: Progress,
) -> list[Collector]:
    """Run the pipeline over the prompts with all layers observed."""
    batches = split_batches(prompts, settings)

    def report(calls: int) -> None:
        total = len(batches) * len(pipe.scheduler.timesteps)
        progress("denoising", min(calls, total), total)

    collectors = [
        Collector(name, getattr(pipe, name), found, settings.buckets)
        for name, found in layers.items()
    ]
    with ExitStack() as stack:
        for collector in collectors:
            stack.enter_context(collector.attached(pipe.scheduler, report))
        try:
            for batch in batches:
                for collector in collectors:
                    collector.begin_batch(batch.seeds)
                run_batch(pipe, batch, settings)
        except torch.OutOfMemoryError as error:
            raise QuantkitError(
                "out of GPU memory while denoising; take a smaller batch, or --device cpu"
            ) from error
    return collectors


def _digests(layers: dict[str, tuple[Layer, ...]], progress: Progress) -> dict[str, dict[str, str]]:
    total = sum(map(len, layers.values()))
    digests: dict[str, dict[str, str]] = {}
    done = 0
    for name, found in layers.items():
        digests[name] = {}
        for layer in found:
            digests[name][layer.name] = sha256_of(layer.shard, layer.weight)
            done += 1
            progress("hashing weights", done, total)
    return digests
