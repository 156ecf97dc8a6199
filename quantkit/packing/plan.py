"""Planning every byte of the output from recipe, statistics and masks; reads headers only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.filelist import MADE
from quantkit.checkpoint.format_decisions import KEY as FORMATS
from quantkit.checkpoint.spec import PackedConfig, make_config
from quantkit.errors import RecipeError
from quantkit.models.component_layers import Layer, list_layers
from quantkit.models.layer_plan import LayerPlan, plan_layers
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.packing.attention_plan import PlannedAttention, plan_attention
from quantkit.packing.component_inputs import Inputs
from quantkit.packing.doubtful import judge_doubtful
from quantkit.packing.fallback import choose_formats, fell_back
from quantkit.packing.mask_source import refuse_bare_masks
from quantkit.packing.unseen import keep_unseen
from quantkit.packing.weight_plan import WeightPlan
from quantkit.packing.writer import PlannedLayer, ShardPlan, plan_shards
from quantkit.storage.copying import is_weight, list_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration, LayerStatistics
    from quantkit.models.source import Component
    from quantkit.numerics.formats import NumberFormat
    from quantkit.packing.gptq import Rounder
    from quantkit.progress import Progress
    from quantkit.recipe.layer_recipes import ActivationRecipe
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import MaskSet


@dataclass(frozen=True)
class ComponentPlan:
    """The plan of one component."""

    component: Component
    #: of every layer, packed or kept
    treatments: tuple[LayerPlan, ...]
    #: of the layers whose input is rescaled
    smoothing: Mapping[str, float]
    bias_correction: bool
    config: PackedConfig
    shards: tuple[ShardPlan, ...]
    #: other weight files next to the packed ones, which are not copied
    left_out: tuple[Path, ...]
    #: files that are copied, relative to the component
    copied: tuple[Path, ...]


def plan_component(
    component: Component,
    recipe: Recipe,
    *,
    calibration: Calibration | None,
    masks: MaskSet | None,
    hessians: Hessians | None = None,
    progress: Progress,
) -> ComponentPlan:
    """Plan a component.

    Args:
        component: a denoiser.
        recipe: the recipe to apply.
        calibration: statistics of its inputs.
        masks: which weights are kept; without them the recipe's sparsity section decides.
        hessians: second moments of its inputs, which gptq rounding needs.
        progress: told of layers whose smoothing is chosen.

    Raises:
        RecipeError: the recipe packs nothing.
    """
    refuse_bare_masks(masks, recipe)
    layers = list_layers(component)
    inputs = Inputs.of(component, recipe, calibration=calibration, masks=masks, hessians=hessians)
    planned = plan_layers(
        component,
        recipe,
        calibrated=calibration is not None,
        masked=inputs.masked(layers),
        edges=inputs.edges,
    )
    agreed = tuple(_with_agreed_buckets(t, inputs) for t in keep_unseen(planned, inputs))
    tried = _smoothing(component, agreed, inputs, progress)
    step = f"formats of {component.name or component.class_name}"
    chosen = choose_formats(agreed, tried, inputs, step=step, progress=progress)
    judged = judge_doubtful(chosen, tried, inputs)
    smoothing = _kept_smoothing(judged, tried)
    treatments = tuple(_if_smooth(treatment, smoothing) for treatment in judged)
    refuse_nothing(component, recipe, treatments)
    packed = {
        t.layer.name: _plan_layer(t, t.scheme, inputs, smoothing.get(t.layer.name))
        for t in treatments
        if t.scheme is not None
    }
    seen = None if calibration is None else calibration.attention_of(component)
    attention = plan_attention(component, recipe.attention, seen)
    told = _told(recipe, treatments, smoothing, attention)
    return assemble_plan(
        component, recipe, treatments, packed, attention, smoothing=smoothing, told=told
    )


def refuse_nothing(component: Component, recipe: Recipe, treatments: Sequence[LayerPlan]) -> None:
    """Refuse to pack no layer at all.

    Raises:
        RecipeError: with the reason of the first layer.
    """
    if not any(treatment.scheme for treatment in treatments):
        raise RecipeError(
            f"recipe {recipe.name}: packs no layer of {component.path}; "
            f"{treatments[0].layer.name if treatments else 'it'}: "
            f"{treatments[0].reason if treatments else 'has no Linear or Conv2d'}"
        )


def assemble_plan(
    component: Component,
    recipe: Recipe,
    treatments: tuple[LayerPlan, ...],
    packed: Mapping[str, PlannedLayer],
    attention: PlannedAttention,
    *,
    smoothing: Mapping[str, float],
    told: Mapping[str, Any],
) -> ComponentPlan:
    """Return the plan of a component, its layers decided; ``told`` is the header's JSON."""
    mine = {shard.name for shard in component.shards} | {"config.json", *MADE}
    if component.index is not None:
        mine.add(component.index.name)
    model = component.path.parent if component.name else component.path
    found = list_files(component.path, within=model)
    others = [file for file in found if str(file) not in mine]
    return ComponentPlan(
        component,
        treatments,
        smoothing,
        recipe.bias_correction,
        make_config(
            {name: layer.plan.scheme for name, layer in packed.items()},
            attention.packed,
        ),
        plan_shards(component, told, packed, attention.tensors),
        tuple(file for file in others if is_weight(file)),
        tuple(file for file in others if not is_weight(file)),
    )


def _with_agreed_buckets(treatment: LayerPlan, inputs: Inputs) -> LayerPlan:
    """Return the treatment with the buckets of ``auto``, which the statistics decide."""
    layer, scheme = treatment.layer, treatment.scheme
    activation = inputs.recipe.settings(layer.name).activation
    if scheme is None or activation.mode != "static" or activation.buckets != "auto":
        return treatment
    if scheme.smooth:
        raise RecipeError(
            f"{layer.name}: activation.buckets auto cannot be used with smooth, which changes the "
            "scales; give a number of buckets, or drop smooth"
        )
    return replace(treatment, scheme=replace(scheme, buckets=_agreed(layer, scheme, inputs)))


def _agreed(layer: Layer, scheme: Scheme, inputs: Inputs) -> tuple[float, ...]:
    from quantkit.calibration.statistics.observers import agreeing_edges

    activation = inputs.recipe.settings(layer.name).activation
    return agreeing_edges(inputs.statistics(layer), activation, scheme.input, inputs.edges)


def _smoothing(
    component: Component, treatments: Sequence[LayerPlan], inputs: Inputs, progress: Progress
) -> dict[str, float]:
    """Return the smoothing of the layers that have it."""
    smooth = [t.layer.name for t in treatments if t.scheme is not None and t.scheme.smooth]
    if not smooth:
        return {}
    from quantkit.packing.smoothing_strength import choose_strengths

    expected = inputs.recipe.smooth
    if expected == "auto":
        step = f"smoothing of {component.name or component.class_name}"
        alphas = choose_strengths(treatments, inputs, step=step, progress=progress)
    else:
        alphas = dict.fromkeys(smooth, expected)
    return {name: alpha for name in smooth if (alpha := alphas[name]) is not None}


def _kept_smoothing(
    treatments: Sequence[LayerPlan], tried: Mapping[str, float]
) -> Mapping[str, float]:
    """Return the strengths of the layers that are still smoothed; a fallback is not."""
    smooth = {t.layer.name for t in treatments if t.scheme is not None and t.scheme.smooth}
    return {name: alpha for name, alpha in tried.items() if name in smooth}


def _if_smooth(treatment: LayerPlan, smoothing: Mapping[str, float]) -> LayerPlan:
    """Return the treatment without smoothing where none of it was chosen."""
    if treatment.scheme is None or treatment.layer.name in smoothing:
        return treatment
    return replace(treatment, scheme=replace(treatment.scheme, smooth=False))


def recipe_for_header(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe for the header."""
    # How globs are read says nothing of what was packed, nor does what was not asked for.
    unsaid = {key for key in ("text_encoders", "vae", "attention") if getattr(recipe, key) is None}
    return recipe.model_dump(mode="json", exclude={"unmatched"} | unsaid)


def _told(
    recipe: Recipe,
    treatments: Sequence[LayerPlan],
    smoothing: Mapping[str, float],
    attention: PlannedAttention,
) -> dict[str, Any]:
    """Return the recipe for the header, with what was chosen for each layer."""
    told = recipe_for_header(recipe)
    if fallen := {t.layer.name: t.reason for t in treatments if fell_back(t)}:
        told["fallback_chosen"] = fallen
    if recipe.smooth == "auto":
        told["smooth_chosen"] = dict(sorted(smoothing.items()))
    if attention.formats:
        formats = sorted(attention.formats.items())
        told[FORMATS] = {name: asdict(decision) for name, decision in formats}
    return told


def _plan_layer(
    treatment: LayerPlan, scheme: Scheme, inputs: Inputs, alpha: float | None
) -> PlannedLayer:
    layer, activation = treatment.layer, inputs.activation(treatment.layer, scheme)
    smooth, input_scale, mean = None, None, None
    if alpha is not None:
        smooth = partial(_factor, alpha, inputs.statistics(layer))
    if scheme.activation is Activation.STATIC:
        input_scale = partial(
            _static, inputs.statistics(layer), activation, scheme.input, inputs.edges
        )
    if inputs.recipe.bias_correction and layer.bias:
        mean = _mean(layer, inputs)
    mask = None if scheme.sparsity is None else inputs.mask_source(layer)
    rounder = None
    if treatment.weight.rounding == "gptq":
        rounder = _rounder(layer, inputs, centred=mean is not None)
    blocks = inputs.component.blocks.get(layer.name) if scheme.weight.block else None
    if blocks is not None:
        # Copied as they are: nothing is lost that a bias could make up for, nothing is rounded.
        mean, rounder = None, None
    plan = WeightPlan(
        layer.name,
        scheme,
        treatment.weight.scale_rule,
        mask=mask,
        smooth=smooth,
        input_scale=input_scale,
        mean=mean,
        rounder=rounder,
        blocks=blocks,
    )
    return PlannedLayer(plan, tuple(inputs.expected(layer)))


def _rounder(layer: Layer, inputs: Inputs, *, centred: bool) -> Rounder:
    from quantkit.packing.gptq import Rounder

    assert inputs.hessians is not None, "refuse_unfit refuses recipes without their moments"
    return Rounder(inputs.hessians, inputs.component, layer, centred=centred)


def _mean(layer: Layer, inputs: Inputs) -> Tensor:
    """Return E[x] of each column over all timesteps, (K,)."""
    from quantkit.calibration.statistics.layer_statistics import per_column

    return per_column(inputs.statistics(layer).pooled().mean[0], layer.area)


def _factor(alpha: float, statistics: LayerStatistics, columns: Tensor) -> Tensor:
    from quantkit.calibration.statistics.smoothing import input_factor

    return input_factor(alpha, statistics, columns)


def _static(
    statistics: LayerStatistics,
    activation: ActivationRecipe,
    fmt: NumberFormat,
    edges: tuple[float, ...],
    factor: Tensor | None,
) -> Tensor:
    from quantkit.calibration.statistics.observers import HEADROOM, static_scale

    # Formats and smoothing are compared without it: stored rows are hardly ever the largest, and
    # FP8 stood in for int8 where pictures were nearer in int8.
    return static_scale(statistics, activation, fmt, factor, edges=edges, headroom=HEADROOM)
