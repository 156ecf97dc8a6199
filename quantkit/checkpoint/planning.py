"""From recipe, statistics and masks to a plan of every byte: nothing is read but headers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.hessian import Hessians
from quantkit.calibration.observers import agreeing_edges, refuse_without_average, static_scale
from quantkit.calibration.shifting import input_shift
from quantkit.calibration.smoothing import smooth_factor
from quantkit.calibration.statistics import Calibration, LayerStatistics, per_column
from quantkit.checkpoint.copying import is_weight, list_files
from quantkit.checkpoint.encode import MaskSource, WeightPlan
from quantkit.checkpoint.masking import chosen_mask, refuse_bare_masks, stored_mask
from quantkit.checkpoint.rounding import Rounder
from quantkit.checkpoint.spec import PackedConfig, make_config
from quantkit.checkpoint.writer import PackedLayer, ShardPlan, plan_shards
from quantkit.errors import ArtefactError, RecipeError
from quantkit.models.layers import Layer, list_layers
from quantkit.models.plan import Treatment, plan_layers
from quantkit.models.source import Component
from quantkit.numerics.formats import FloatFormat
from quantkit.numerics.masks import MASKS, TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.recipe import ActivationRecipe, Recipe
from quantkit.sparsity.maskfile import LayerMask, MaskSet


@dataclass(frozen=True)
class ComponentPlan:
    """What becomes of one component."""

    component: Component
    #: of every layer, packed or kept
    treatments: tuple[Treatment, ...]
    config: PackedConfig
    shards: tuple[ShardPlan, ...]
    #: other weights beside the packed ones, which are not copied
    left_out: tuple[Path, ...]
    #: files that are copied, relative to the component
    copied: tuple[Path, ...]


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What is known of one component besides its weights."""

    component: Component
    recipe: Recipe
    edges: tuple[float, ...]
    #: None without a calibration
    statistics: Mapping[str, LayerStatistics] | None
    digests: Mapping[str, str]
    #: None: masks are chosen while packing
    masks: Mapping[str, LayerMask] | None
    #: None without second moments
    hessians: Hessians | None


def plan_component(
    component: Component,
    recipe: Recipe,
    *,
    calibration: Calibration | None,
    masks: MaskSet | None,
    hessians: Hessians | None = None,
) -> ComponentPlan:
    """Decide what becomes of a component.

    Args:
        component: a denoiser.
        recipe: what is wanted.
        calibration: statistics of its inputs.
        masks: which weights are kept; without them the recipe's sparsity section decides.
        hessians: second moments of its inputs, which gptq rounding needs.

    Raises:
        RecipeError: the recipe packs nothing, or needs statistics that are not there.
        ArtefactError: masks or statistics that do not fit the component.
    """
    refuse_bare_masks(masks, recipe)
    inputs = _Inputs(
        component,
        recipe,
        () if calibration is None else calibration.edges,
        None if calibration is None else calibration.of(component),
        {} if calibration is None else calibration.digests_of(component),
        None if masks is None else masks.of(component),
        hessians,
    )
    layers = list_layers(component)
    planned = plan_layers(
        component,
        recipe,
        calibrated=calibration is not None,
        masked=_masked(layers, inputs),
        edges=inputs.edges,
    )
    treatments = tuple(_with_agreed_buckets(treatment, inputs) for treatment in planned)
    schemes = {t.layer.name: t.scheme for t in treatments if t.scheme is not None}
    if not schemes:
        raise RecipeError(
            f"recipe {recipe.name}: packs no layer of {component.path}; "
            f"{treatments[0].layer.name if treatments else 'it'}: "
            f"{treatments[0].reason if treatments else 'has no Linear or Conv2d'}"
        )
    packed = {
        t.layer.name: _plan_layer(t.layer, t.scheme, inputs)
        for t in treatments
        if t.scheme is not None
    }
    shards = plan_shards(component.shards, recipe.model_dump(mode="json"), packed)
    mine = {shard.name for shard in component.shards} | {"config.json"}
    if component.index is not None:
        mine.add(component.index.name)
    others = [file for file in list_files(component.path) if str(file) not in mine]
    return ComponentPlan(
        component,
        treatments,
        make_config(schemes),
        shards,
        tuple(file for file in others if is_weight(file)),
        tuple(file for file in others if not is_weight(file)),
    )


def _masked(layers: tuple[Layer, ...], inputs: _Inputs) -> frozenset[str]:
    """Return the layers that have a mask, or get one while packing."""
    if inputs.masks is None:
        return frozenset(
            layer.name for layer in layers if inputs.recipe.settings(layer.name).sparse
        )
    shapes = {layer.name: layer for layer in layers}
    for name, mask in inputs.masks.items():
        if name not in shapes:
            raise ArtefactError(
                f"masks: layer {name}: not in this model; make the masks from this model"
            )
        wanted, found = (shapes[name].n, -(-shapes[name].k // 8)), tuple(mask.bits.shape)
        if found != wanted:
            raise ArtefactError(
                f"masks: layer {name}: shape {found}, wanted {wanted}; "
                "make the masks from this model"
            )
        if mask.pattern != TWO_OF_FOUR:
            raise ArtefactError(
                f"masks: pattern {mask.pattern}, the packed format holds {TWO_OF_FOUR}; "
                "run 'quantkit sparsify' with --pattern 2:4"
            )
    return frozenset(inputs.masks)


def _with_agreed_buckets(treatment: Treatment, inputs: _Inputs) -> Treatment:
    """Return the treatment with the buckets of ``auto``, which the statistics decide."""
    layer, scheme = treatment.layer, treatment.scheme
    activation = inputs.recipe.settings(layer.name).activation
    if scheme is None or activation.mode != "static" or activation.buckets != "auto":
        return treatment
    if scheme.smooth:
        raise RecipeError(
            f"{layer.name}: activation.buckets auto with smooth: its scales are known only when "
            "the weight is read; give a number of buckets, or drop smooth"
        )
    edges = agreeing_edges(_statistics(layer, inputs), activation, scheme.weight, inputs.edges)
    return replace(treatment, scheme=replace(scheme, buckets=edges))


def _plan_layer(layer: Layer, scheme: Scheme, inputs: _Inputs) -> PackedLayer:
    settings = inputs.recipe.settings(layer.name)
    smooth, input_scale, shift = None, None, None
    if scheme.shift:
        shift = input_shift(_statistics(layer, inputs), inputs.edges, scheme.buckets)
    if scheme.smooth:
        assert inputs.recipe.smooth is not None
        smooth = partial(_smooth, _statistics(layer, inputs), inputs.recipe.smooth)
    if scheme.activation is Activation.STATIC:
        statistics = _statistics(layer, inputs)
        refuse_without_average(statistics, settings.activation.observer)
        # The scheme has the edges that were chosen, also where the recipe has a number or auto.
        chosen = settings.activation.model_copy(update={"buckets": scheme.buckets or 1})
        input_scale = partial(_static, statistics, chosen, scheme.weight, inputs.edges, shift=shift)
    mask = None if scheme.sparsity is None else _mask_source(layer, inputs)
    rounder = _rounder(layer, inputs) if settings.weight.rounding == "gptq" else None
    plan = WeightPlan(
        layer.name,
        scheme,
        settings.weight.observer,
        mask=mask,
        smooth=smooth,
        input_scale=input_scale,
        shift=shift,
        rounder=rounder,
    )
    return PackedLayer(plan, tuple(_expected(layer, inputs)))


def _rounder(layer: Layer, inputs: _Inputs) -> Rounder:
    if inputs.hessians is None:
        raise RecipeError(
            f"{layer.name}: weight.rounding gptq needs second moments; pass --hessians (from "
            "'quantkit calibrate hessian'), or set weight.rounding: nearest"
        )
    if layer.name not in inputs.hessians.digests_of(inputs.component):
        raise ArtefactError(
            f"hessians: no layer {layer.name}; take them of this model with the same recipe"
        )
    return Rounder(inputs.hessians, inputs.component, layer, centred=False)


def _expected(layer: Layer, inputs: _Inputs) -> Iterator[tuple[str, str]]:
    """Yield who says what the source weight must hash to."""
    if layer.name in inputs.digests:
        yield "calibration", inputs.digests[layer.name]
    if inputs.masks is not None and layer.name in inputs.masks:
        yield "masks", inputs.masks[layer.name].source_digest
    if inputs.hessians is not None:
        digests = inputs.hessians.digests_of(inputs.component)
        if layer.name in digests:
            yield "hessians", digests[layer.name]


def _statistics(layer: Layer, inputs: _Inputs) -> LayerStatistics:
    assert inputs.statistics is not None, "plan_layers refuses what needs a calibration"
    statistics = inputs.statistics.get(layer.name)
    if statistics is None:
        raise ArtefactError(
            f"calibration: no statistics of layer {layer.name}; calibrate this model with the "
            "same recipe"
        )
    channels = statistics.channel_amax.shape[-1]
    if channels != layer.channels:
        raise ArtefactError(
            f"calibration: layer {layer.name}: {channels} input channels, wanted "
            f"{layer.channels}; calibrate this model"
        )
    return statistics


def _smooth(statistics: LayerStatistics, alpha: float, columns: Tensor) -> Tensor:
    # The factor depends on the columns' amax alone, so one row stands for the whole weight.
    return smooth_factor(statistics, columns.unsqueeze(0), alpha)


def _static(
    statistics: LayerStatistics,
    activation: ActivationRecipe,
    fmt: FloatFormat,
    edges: tuple[float, ...],
    factor: Tensor | None,
    *,
    shift: Tensor | None,
) -> Tensor:
    return static_scale(statistics, activation, fmt, factor, edges=edges, shift=shift)


def _mask_source(layer: Layer, inputs: _Inputs) -> MaskSource:
    if inputs.masks is not None:
        return partial(stored_mask, inputs.masks[layer.name])
    assert inputs.recipe.sparsity is not None, "plan_layers gives no pattern without the section"
    scorer, moment = MASKS[inputs.recipe.sparsity.method], None
    if inputs.statistics is not None:
        pooled = _statistics(layer, inputs).pooled()
        moment = per_column(pooled.second_moment[0], layer.area)
    # A method that misses its statistics says so here, before anything is written.
    scorer(torch.ones(1, layer.k), moment)
    return partial(chosen_mask, scorer, moment)
