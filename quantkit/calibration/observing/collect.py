"""Calibrating: run a pipeline on prompts and keep the statistics of what its layers read."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

from quantkit.calibration.observing.calibration_resume import (
    PartialFile,
    PartialSums,
    WriteInterval,
    others,
)
from quantkit.calibration.observing.observed_pipeline import ObservedPipeline
from quantkit.calibration.statistics.layer_statistics import Calibration, CalibrationProvenance
from quantkit.calibration.statistics.merge import Part, join_parts
from quantkit.errors import ArtefactError, OutputError, PromptError
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.layer_plan import is_packed_alone, kept_reason, length_reason
from quantkit.models.source import Component, Model
from quantkit.pipelines.batches import GrowingBatches, split_batches
from quantkit.pipelines.processes import ALONE, Processes
from quantkit.pipelines.running import choose_device, choose_dtype, quiet_libraries, read_prompts
from quantkit.progress import Progress
from quantkit.recipe.calibration import CalibrationRecipe
from quantkit.recipe.fields import matches
from quantkit.recipe.schema import Recipe
from quantkit.storage.digest import sha256_of
from quantkit.storage.jsonfile import parsing

__all__ = [
    "CalibrationRun",
    "calibrate",
    "calibrate_share",
    "layers_to_pack",
    "library_versions",
    "observed_layers",
    "read_prompts",
    "weight_digests",
]

_LOG = logging.getLogger(__name__)

#: SHA-256 of each layer's weight, by component and layer.
Digests = dict[str, dict[str, str]]


def calibrate(
    model: Model, recipe: Recipe, prompts: Sequence[str], *, device: str, progress: Progress
) -> Calibration:
    """Run the pipeline on prompts and return the statistics of every layer that can be packed.

    Args:
        model: a pipeline.
        recipe: its calibration section says how to run; all layers are observed, whatever it packs.
        prompts: the first ``recipe.calibration.prompts`` are used.
        device: auto, cpu or cuda[:N]; float32 on the CPU, else the 16-bit dtype of the weights.
        progress: told of weights hashed and of denoiser calls.

    Raises:
        ModelError: MODEL is one component, or diffusers cannot load it.
        NonFiniteError: NaN or Inf in an activation; the text names layer and step.
        PromptError: no prompts.
        RecipeError: more buckets than steps.
    """
    run = CalibrationRun(model, recipe, tuple(prompts), device)
    digests = weight_digests(run.layers, progress)
    part = _collect(run, ALONE, None, None, progress)
    assert part is not None, "one process takes all batches, of which there is one at least"
    return Calibration(part.layers, part.edges, run.provenance(digests, part), part.attention)


def calibrate_share(
    run: "CalibrationRun",
    output: Path,
    *,
    processes: Processes,
    resume: bool,
    progress: Progress,
    note: Callable[[str], None],
) -> tuple[Calibration | None, PartialFile]:
    """Calibrate in one of several processes, keeping what is done in the output's folder.

    Args:
        run: the same in every process.
        output: where the calibration will be written; partial ones lie in its folder.
        processes: each takes a run of whole batches.
        resume: go on with what a run that was killed had kept.
        progress: told of weights hashed and of this process's denoiser calls.
        note: told, in the first process, what an earlier run had kept.

    Returns:
        what ``calibrate`` returns, in the first process, None in the others; and what to discard
        once it is written.

    Raises:
        ArtefactError: kept by a run with other settings, or with other processes.
        QuantkitError: as ``calibrate``, from any process.
    """
    with processes.together():
        mine = weight_digests(run.layers, progress) if processes.is_first else {}
    digests = processes.exchange(mine)[0]
    kept = PartialFile(output, processes, run.facts(digests))
    if not resume and processes.is_first and kept.path.exists():
        note(f"{output}: a partial calibration is there; resume goes on with it, this run does not")
    before = _read_kept(kept, processes, note) if resume else None
    own = _collect(run, processes, kept, before, progress)
    parts = [part for part in processes.gather(own) if part is not None]
    if not processes.is_first:
        return None, kept
    part = join_parts(parts)
    about = run.provenance(digests, part)
    return Calibration(part.layers, part.edges, about, part.attention), kept


def observed_layers(component: Component, recipe: Recipe) -> tuple[Layer, ...]:
    """Return the layers whose input is observed: all that any recipe could pack."""
    return tuple(
        layer
        for layer in list_layers(component)
        if not length_reason(layer) and not matches(layer.name, recipe.not_layers)
    )


def layers_to_pack(component: Component, recipe: Recipe) -> tuple[Layer, ...]:
    """Return the layers that the plan packs."""
    family = component.family
    return tuple(
        layer
        for layer in list_layers(component)
        if kept_reason(layer, family, recipe, calibrated=True) is None
        or is_packed_alone(layer, family, recipe)
    )


@dataclass(frozen=True)
class CalibrationRun:
    """A model to calibrate, and the settings."""

    model: Model
    recipe: Recipe
    #: of which the first ``recipe.calibration.prompts`` are used
    texts: tuple[str, ...]
    #: auto, cpu or cuda[:N]
    device: str

    @property
    def settings(self) -> CalibrationRecipe:
        """The calibration section of the recipe."""
        return self.recipe.calibration

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """The prompts that are used.

        Raises:
            PromptError: there are none.
        """
        if not self.texts:
            raise PromptError("no prompts, expected at least one")
        return self.texts[: self.settings.prompts]

    @property
    def prompts_digest(self) -> str:
        """SHA-256 of the prompts, one a line."""
        return hashlib.sha256("\n".join(self.prompts).encode()).hexdigest()

    @cached_property
    def layers(self) -> dict[str, tuple[Layer, ...]]:
        """The layers that are observed, by component."""
        return {c.name: observed_layers(c, self.recipe) for c in self.model.components}

    def facts(self, digests: Digests) -> dict[str, Any]:
        """Return what decides the statistics, under the names that messages call it."""
        settings, attention = self.settings, self.recipe.attention
        weights = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        dtype = choose_dtype(self.model, choose_device(self.device))
        return {
            "steps": settings.steps,
            "guidance": settings.guidance,
            "seed": settings.seed,
            "batch": settings.batch,
            "buckets": settings.buckets,
            "prompts": self.prompts_digest,
            "model": weights,
            "errors of formats": None if attention is None else attention.errors_from,
            "compute dtype": str(dtype).removeprefix("torch."),
            "versions": library_versions(),
        }

    def provenance(self, digests: Digests, part: Part) -> CalibrationProvenance:
        """Return how the statistics of all batches were taken."""
        return CalibrationProvenance(
            digests=digests,
            recipe=self.recipe.name,
            prompts=len(self.prompts),
            prompts_digest=self.prompts_digest,
            steps=self.settings.steps,
            guidance=self.settings.guidance,
            seed=self.settings.seed,
            calls=part.calls,
            versions=library_versions(),
        )


def _read_kept(
    kept: PartialFile, processes: Processes, note: Callable[[str], None]
) -> PartialSums | None:
    """Return what this process had kept, if it had."""
    with processes.together():
        found = kept.read()
    if any(processes.exchange(found is not None)):
        if processes.is_first and found is not None:
            note(f"{kept.output}: going on after {found.batches} batches of a partial calibration")
        return found
    if parts := ", ".join(path.name for path in others(kept.output)):
        raise ArtefactError(
            f"{kept.output}: no partial calibration of {processes.count} processes to resume, "
            f"found {parts}; start as many processes as before, or do not resume",
            fields=("resume",),
        )
    if processes.is_first:
        note(f"{kept.output}: no partial calibration yet; starting at the first prompt")
    return None


def _collect(
    run: CalibrationRun,
    processes: Processes,
    kept: PartialFile | None,
    before: PartialSums | None,
    progress: Progress,
) -> Part | None:
    """Run this process's batches, from where ``before`` ends, and return what all of them gave."""
    with processes.together():
        batches = split_batches(run.prompts, run.settings)
        share = [batches[index] for index in processes.share(len(batches))]
        todo = share[0 if before is None else before.batches :]
        device = processes.device(run.device)
        growing = GrowingBatches(
            todo,
            choose_device(device),
            users=processes.on_a_device(),
            count=None if before is None else before.at_once,
        )
    interval = WriteInterval()
    with quiet_libraries(), ExitStack() as stack:
        with processes.together():
            observed = (
                ObservedPipeline(
                    run.model,
                    run.layers,
                    run.recipe,
                    device,
                    prompts=run.prompts,
                    batches=len(todo),
                    progress=progress,
                    stack=stack,
                )
                if todo
                else None
            )
            if observed is not None and before is not None:
                assert kept is not None
                with parsing(kept.path, cure="do not resume"):
                    observed.put(before)
        while any(processes.exchange(len(growing) > 0)):
            with processes.together():
                if observed is None or not growing:
                    continue
                with growing.next() as batch:
                    observed.run(batch)
                if kept is not None and interval.is_due():
                    started = monotonic()
                    _keep(kept, replace(observed.taken(), at_once=growing.count))
                    interval.wrote(started)
    found = before if observed is None else observed.taken()
    return None if found is None else found.part()


def _keep(kept: PartialFile, found: PartialSums) -> None:
    """Write what is done so far; where that fails, the run goes on without."""
    try:
        kept.write(found)
    except OutputError as error:
        _LOG.warning("%s; going on, but a killed run could not be resumed from here", error)


def library_versions() -> dict[str, str]:
    """Return what the statistics depend on besides model and settings."""
    return {name: version(name) for name in ("quantkit", "torch", "diffusers")}


def weight_digests(layers: Mapping[str, tuple[Layer, ...]], progress: Progress) -> Digests:
    """Return the SHA-256 of the source weight of each layer, by component and layer."""
    total = sum(map(len, layers.values()))
    digests: Digests = {}
    done = 0
    for name, found in layers.items():
        digests[name] = {}
        for layer in found:
            digests[name][layer.name] = sha256_of(layer.shard, layer.weight)
            done += 1
            progress("hashing weights", done, total)
    return digests
