"""Measuring a model's sensitivity: every layer on stored inputs, some of them in the pipeline.

Attention modules are measured in the pipeline, during its run without treatments.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ArtefactError, RecipeError
from quantkit.models.component_layers import Layer
from quantkit.models.source_tensors import source_tensors
from quantkit.pipelines.own_inputs import OwnInputs
from quantkit.pipelines.running import (
    choose_device,
    load_pipeline,
    quiet_libraries,
    rehearse_prompts,
)
from quantkit.progress import Progress, tracked
from quantkit.recipe.goals import BudgetRecipe
from quantkit.recipe.schema import Recipe
from quantkit.sensitivity.budget import allowed_names, make_problems, optimize
from quantkit.sensitivity.local_error import LocalError, local_errors
from quantkit.sensitivity.measured_model import MeasuredModel
from quantkit.sensitivity.probe_selection import next_probe
from quantkit.sensitivity.sensitivity_file import (
    ATTENTION,
    LayerSensitivity,
    Measured,
    Outcome,
    Sensitivity,
    SensitivityProvenance,
)
from quantkit.sensitivity.simulate import final_latents, relative_error, treated
from quantkit.sensitivity.treated_attention import AttentionErrors, rounding
from quantkit.sensitivity.treatment_cost import (
    RX_9070_XT,
    attention_seconds,
    modelled_seconds,
    packed_bytes,
    strides_of,
)
from quantkit.sensitivity.treatments import ATTENTION_BY_NAME, BY_NAME, SIXTEEN_BIT
from quantkit.storage.digest import sha256_of


def measure_sensitivity(
    subject: MeasuredModel,
    prompts: Sequence[str],
    *,
    measure: int,
    device: str,
    calibration_digest: str,
    keep: Callable[[Sensitivity], None],
    progress: Progress,
) -> Sensitivity:
    """Return the error of every layer under every treatment, and the gains of some.

    Args:
        subject: model, recipe and calibration. The recipe's calibration section says how the
            pipeline is run, its budget where the edge is.
        prompts: that the pipeline is run on.
        measure: most layers to run in the pipeline; 0 runs none.
        device: auto, cpu or cuda[:N].
        calibration_digest: SHA-256 of the calibration's file, for the record.
        keep: given the layers' errors as soon as they are known: what follows may fail.
        progress: told of layers done.

    Raises:
        ArtefactError: the calibration has other weights or no stored inputs.
        NonFiniteError: NaN or Inf in a weight or in the latents.
    """
    allowed_names(_budget(subject.recipe).treatments)
    target = choose_device(device)
    settings = subject.recipe.calibration
    chosen = tuple(prompts) if measure else ()
    with quiet_libraries():
        # Before the long work: a pipeline that does not run should not be found out after it.
        rehearsed = TriedPipeline.of(subject, chosen, target) if measure else None
    layers = _measure_locally(subject, target, progress)
    about = SensitivityProvenance(
        model=str(subject.model.path),
        model_digest=_digest([layer.digest for layer in layers]),
        calibration_digest=calibration_digest,
        prompts=len(chosen),
        prompts_digest=_digest(chosen),
        steps=settings.steps,
        guidance=settings.guidance,
        seed=settings.seed,
        device=RX_9070_XT.name,
        versions={name: version(name) for name in ("quantkit", "torch", "diffusers")},
    )
    result = Sensitivity(
        subject.component.name,
        subject.component.family.name,
        layers,
        subject.calibration.edges,
        _fixed_bytes(subject),
        subject.recipe,
        about,
    )
    keep(result)
    if rehearsed is None:
        return result
    with quiet_libraries():
        errors = AttentionErrors(subject.attention_scales(target))
        probe = Probing.start(rehearsed, errors)
        modules = tuple(_attention_layer(subject, name, errors) for name in subject.attention)
        result = replace(result, layers=(*layers, *modules))
        return _measure_gains(result, probe, measure, progress)


@dataclass(frozen=True, eq=False)
class TriedPipeline:
    """A loaded pipeline that passed a trial on prompts."""

    subject: MeasuredModel
    pipe: Any
    prompts: tuple[str, ...]
    inputs: OwnInputs | None

    @classmethod
    def of(
        cls, subject: MeasuredModel, prompts: Sequence[str], device: torch.device
    ) -> "TriedPipeline":
        """Load the pipeline, and try it.

        Raises:
            ModelError: it cannot be loaded, or run so.
        """
        pipe = load_pipeline(subject.model, device)
        inputs = rehearse_prompts(pipe, prompts, subject.recipe.calibration)
        return cls(subject, pipe, tuple(prompts), inputs)

    @property
    def denoiser(self) -> nn.Module:
        """The pipeline's denoiser."""
        denoiser: nn.Module = getattr(self.pipe, self.subject.component.name)
        return denoiser

    def latents(self) -> Tensor:
        """Return its final latents."""
        settings = self.subject.recipe.calibration
        return final_latents(self.pipe, self.prompts, settings, self.inputs)


@dataclass(frozen=True, eq=False)
class Probing:
    """A pipeline, and its final latents without treatments."""

    pipeline: TriedPipeline
    untouched: Tensor

    @classmethod
    def start(cls, pipeline: TriedPipeline, errors: AttentionErrors) -> "Probing":
        """Run the pipeline without treatments, and measure errors of attention modules."""
        with errors.listening(pipeline.denoiser):
            return cls(pipeline, pipeline.latents())

    def error(self, treatments: Mapping[str, str]) -> float:
        """Return the NMSE of the final latents with layers under treatments, by name."""
        with self.treated(treatments):
            return relative_error(self.pipeline.latents(), self.untouched)

    def treated(self, treatments: Mapping[str, str]) -> AbstractContextManager[None]:
        """Return the context in which layers have their treatments."""
        return treated_pipeline(self.pipeline.subject, self.pipeline.pipe, treatments)


@contextmanager
def treated_pipeline(
    subject: MeasuredModel, pipe: Any, treatments: Mapping[str, str]
) -> Iterator[None]:
    """Let layers and attention of a pipeline compute under their treatments while the body runs.

    Args:
        subject: of which the pipeline was loaded.
        pipe: a diffusers pipeline.
        treatments: name of the treatment by module path; 16-bit is left alone.
    """
    denoiser: nn.Module = getattr(pipe, subject.component.name)
    device = next(denoiser.parameters()).device
    substitutes = {
        layer: subject.substitute(layer, name, device)
        for layer, name in treatments.items()
        if name in BY_NAME and name != SIXTEEN_BIT.name
    }
    formats = {
        module: ATTENTION_BY_NAME[name].format
        for module, name in treatments.items()
        if name in ATTENTION_BY_NAME
    }
    scales = subject.attention_scales(device)
    with treated(denoiser, substitutes), rounding(denoiser, formats, scales):
        yield


def _measure_gains(
    sensitivity: Sensitivity, probing: Probing, most: int, progress: Progress
) -> Sensitivity:
    budget, notes = _edge(sensitivity)
    for done in range(most):
        progress("running the pipeline", done, most)
        problems = make_problems(sensitivity, sensitivity.recipe, budget.treatments)
        probe = next_probe(optimize(problems, budget), budget)
        if probe is None:
            break
        found = Measured(probe.treatment, probing.error({probe.layer: probe.treatment}))
        layers = tuple(
            replace(layer, measured=found) if layer.name == probe.layer else layer
            for layer in sensitivity.layers
        )
        sensitivity = replace(sensitivity, layers=layers)
        notes.append(f"{probe.layer}: {probe.treatment}: {probe.why}")
    progress("running the pipeline", most, most)
    return replace(sensitivity, notes=tuple(notes))


def _budget(recipe: Recipe) -> BudgetRecipe:
    return recipe.budget or BudgetRecipe()


def _edge(sensitivity: Sensitivity) -> tuple[BudgetRecipe, list[str]]:
    """Return the budget whose edge is probed, and notes on it."""
    budget = _budget(sensitivity.recipe)
    halfway = BudgetRecipe(treatments=budget.treatments)
    if budget.ssim is not None:
        return halfway, ["budget ssim: edges are those at half of what bytes can be saved"]
    try:
        optimize(make_problems(sensitivity, sensitivity.recipe, budget.treatments), budget)
    except RecipeError as error:
        return halfway, [f"{error}; edges are those at half of what bytes can be saved"]
    return budget, []


def _measure_locally(
    subject: MeasuredModel, device: torch.device, progress: Progress
) -> tuple[LayerSensitivity, ...]:
    strides = strides_of(subject.component)
    layers = tuple(subject.layers.values())
    return tuple(
        _measure_layer(subject, layer, strides.get(layer.name, 1), device)
        for layer in tracked(progress, "layers on stored inputs", layers)
    )


def _measure_layer(
    subject: MeasuredModel, layer: Layer, stride: int, device: torch.device
) -> LayerSensitivity:
    digest = sha256_of(layer.shard, layer.weight)
    expected = subject.calibration.digests_of(subject.component).get(layer.name)
    if digest != expected:
        raise ArtefactError(
            f"calibration: {layer.name} had other weights (checksum {digest[:12]} now, "
            f"{str(expected)[:12]} then); calibrate this model"
        )
    settings, inputs = subject.recipe.settings(layer.name), subject.inputs(layer.name)
    about = subject.calibration.metadata
    rows = float(inputs.statistics.count.sum()) / (about.prompts * about.steps) / stride
    surgeon = subject.surgeon
    moments = None if surgeon is None else surgeon.moments(subject.component, layer, digest)
    errors = local_errors(layer, settings, inputs, device, moments)

    def outcome(name: str, found: LocalError) -> Outcome:
        treatment = BY_NAME[name]
        nbytes = packed_bytes(layer, treatment, settings.weight, found.edges)
        return Outcome(found.error, nbytes, modelled_seconds(layer, treatment, nbytes, rows))

    outcomes = {name: outcome(name, found) for name, found in errors.items()}
    return LayerSensitivity(layer.name, layer.kind, layer.shape, digest, rows, outcomes)


def _attention_layer(
    subject: MeasuredModel, name: str, errors: AttentionErrors
) -> LayerSensitivity:
    statistics, about = subject.attention[name], subject.calibration.metadata
    rows = float(statistics.queries.sum()) / (about.prompts * about.steps)
    outcomes = {SIXTEEN_BIT.name: Outcome(0.0, 0, attention_seconds(statistics, None, rows))}
    for treatment, error in errors.of(name).items():
        seconds = attention_seconds(statistics, ATTENTION_BY_NAME[treatment], rows)
        outcomes[treatment] = Outcome(error, 0, seconds)
    shape = (statistics.heads, int(statistics.call_keys.max()), statistics.columns)
    return LayerSensitivity(name, ATTENTION, shape, "", rows, outcomes)


def _fixed_bytes(subject: MeasuredModel) -> int:
    """Return the bytes of all tensors but the weights that can be packed."""
    total = sum(info.nbytes for _, info in source_tensors(subject.component).values())
    return total - sum(layer.weight.nbytes for layer in subject.layers.values())


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
