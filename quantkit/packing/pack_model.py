"""``pack``: plan, stream tensor by tensor, check, rename into place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.checkpoint.filelist import MADE
from quantkit.checkpoint.reader import open_packed
from quantkit.models.treated import others_of
from quantkit.packing.calibration_fit import refuse_unfit
from quantkit.packing.card import write_card
from quantkit.packing.config_files import write_config, write_index
from quantkit.packing.final_checks import (
    checked_for_loading,
    list_written,
    refuse_broken,
    refuse_broken_copies,
)
from quantkit.packing.mask_source import masks_beforehand
from quantkit.packing.plan import ComponentPlan, plan_component
from quantkit.packing.summary import ComponentSummary, LayerSummary, PackSummary
from quantkit.packing.writer import write_shards
from quantkit.storage.copying import copy_files, is_pickle, is_weight, list_files
from quantkit.storage.files import staged_directory
from quantkit.storage.places import check_directory, refuse_overlap

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from quantkit.calibration.moments.moment_files import Hessians
    from quantkit.calibration.statistics.layer_statistics import Calibration
    from quantkit.models.layer_plan import LayerPlan
    from quantkit.models.source import Component, Model
    from quantkit.progress import Progress
    from quantkit.recipe.schema import Recipe
    from quantkit.sparsity.maskfile import MaskSet

#: What the marker calls the output.
KIND = "packed model"


@dataclass(frozen=True)
class PackPlan:
    """Everything that is decided before a byte is written."""

    model: Model
    components: tuple[ComponentPlan, ...]
    #: copied, relative to the model
    copied: tuple[Path, ...]
    left_out: tuple[Path, ...]

    @property
    def packed(self) -> list[Path]:
        """The packed weight files, relative to the model."""
        return [Path(c.component.name, shard.name) for c in self.components for shard in c.shards]


def plan_pack(
    model: Model,
    recipe: Recipe,
    *,
    calibration: Calibration | None,
    masks: MaskSet | None,
    progress: Progress,
    hessians: Hessians | None = None,
) -> PackPlan:
    """Decide everything, reading only headers (and weights, for masks that must be known first).

    Raises:
        RecipeError: the recipe packs nothing, needs statistics that are not there, or has a budget.
        ArtefactError: masks or statistics that do not fit the model.
        ModelError: a damaged file.
    """
    recipe.refuse_budget()
    own_moments = moments_for(model.components, hessians, needed=recipe.denoisers_need_hessians)
    others = others_of(model, recipe)
    for component in model.components:
        refuse_unfit(component, recipe, calibration=calibration, masks=masks, hessians=own_moments)
    for component, own in others:
        moments = moments_for((component,), hessians, needed=own.needs_hessians)
        refuse_unfit(component, own, calibration=None, masks=None, hessians=moments)
    if masks is None:
        masks = masks_beforehand(model, recipe, calibration, own_moments, progress=progress)
    components = tuple(
        plan_component(
            component,
            recipe,
            calibration=calibration,
            masks=masks,
            hessians=own_moments,
            progress=progress,
        )
        for component in model.components
    )
    packed_others = tuple(
        plan_component(
            component,
            own,
            calibration=None,
            masks=None,
            hessians=moments_for((component,), hessians, needed=own.needs_hessians),
            progress=progress,
        )
        for component, own in others
    )
    return complete_plan(model, components + packed_others)


def moments_for(
    components: Sequence[Component], hessians: Hessians | None, *, needed: bool
) -> Hessians | None:
    """Return the second moments; None where they lack the components and are not needed.

    Args:
        components: denoisers, or another component: moments may have been taken of either alone.
        hessians: those that are there.
        needed: the recipe does not pack the components without.
    """
    if hessians is None or needed:
        return hessians
    return hessians if all(map(hessians.has, components)) else None


def complete_plan(model: Model, components: tuple[ComponentPlan, ...]) -> PackPlan:
    """Return the plan of a model with planned components, and files to copy or leave out."""
    # Weights at the root of a pipeline are single-file copies of all of it, unpacked.
    planned = {plan.component.name: plan.component.class_name for plan in components}
    refuse_broken(model.path, planned)
    others = (file for file in list_files(model.path) if file.name not in MADE)
    root = [file for file in others if planned.keys().isdisjoint({"", file.parts[0]})]
    dropped = [f for f in root if is_pickle(f) or (is_weight(f) and f.parent == Path())]
    copied = [file for file in root if file not in set(dropped)]
    for plan in components:
        folder = Path(plan.component.name)
        copied += [folder / file for file in plan.copied]
        dropped += [folder / file for file in plan.left_out]
    return PackPlan(model, components, tuple(sorted(copied)), tuple(sorted(dropped)))


def pack(
    model: Model,
    recipe: Recipe,
    output: Path,
    *,
    calibration: Calibration | None,
    masks: MaskSet | None,
    threads: int,
    force: bool,
    progress: Progress,
    hessians: Hessians | None = None,
    joined: Sequence[Collection[str]] = (),
) -> PackSummary:
    """Write the packed checkpoint of a model: all of it, or nothing.

    Args:
        model: the 16-bit source, which is only read.
        recipe: the recipe to apply.
        output: the directory to make.
        calibration: statistics for static scales, smoothing and Wanda.
        masks: which weights are kept; without them the recipe's sparsity section decides.
        threads: tensors in work at the same moment; the bytes do not depend on it.
        force: replace an existing output once the new one is complete.
        progress: told of tensors done.
        hessians: second moments, for gptq rounding and sparsegpt masks.
        joined: layers that get one scale together, where they have one for the tensor.

    Raises:
        InputError: anything that is wrong with the input; ``output`` is as it was.
    """
    refuse_overlap(output, model.path)
    check_directory(output, kind=KIND, force=force)
    plan = plan_pack(
        model, recipe, calibration=calibration, masks=masks, hessians=hessians, progress=progress
    )
    if joined:
        from quantkit.packing.joint_scales import with_joint_scales

        components = tuple(with_joint_scales(component, joined) for component in plan.components)
        plan = replace(plan, components=components)
    refuse_broken_copies(model.path, plan.copied, progress=progress)
    with (
        staged_directory(output, kind=KIND, force=force) as stage,
        checked_for_loading(model.path, plan.components),
    ):
        copy_files(model.path, stage, plan.copied)
        for component in plan.components:
            _write_component(component, stage, threads, progress)
        list_written(stage, plan.copied, plan.packed)
        summary = summarize(plan, output)
        write_card(stage, model.path, recipe, summary)
        # The reader's own check, before the directory gets its name.
        open_packed(stage)
    return summary


def summarize(plan: PackPlan, output: Path) -> PackSummary:
    """Return the summary of a plan; the sizes are exact."""
    sizes = [(plan.model.path / file).stat().st_size for file in plan.copied]
    return PackSummary(
        output,
        tuple(_summarize_component(component) for component in plan.components),
        tuple(
            _summarize_layer(component, treatment)
            for component in plan.components
            for treatment in component.treatments
        ),
        len(sizes),
        sum(sizes),
        plan.left_out,
    )


def _write_component(plan: ComponentPlan, stage: Path, threads: int, progress: Progress) -> None:
    component = plan.component
    folder = stage / component.name
    folder.mkdir(exist_ok=True)
    step = f"pack {component.name or component.class_name}"
    write_shards(plan.shards, folder, threads=threads, step=step, progress=progress)
    if component.index is not None:
        write_index(component.index, plan.shards, folder / component.name_of(component.index))
    write_config(component.path / "config.json", plan.config, folder / "config.json")


def _summarize_component(plan: ComponentPlan) -> ComponentSummary:
    before = sum(shard.stat().st_size for shard in plan.component.shards)
    after = sum(shard.nbytes for shard in plan.shards)
    return ComponentSummary(plan.component.name, plan.component.class_name, before, after)


def _summarize_layer(plan: ComponentPlan, treatment: LayerPlan) -> LayerSummary:
    layer = treatment.layer
    shard = next(s for s in plan.shards if layer.weight.name in s.source.tensors)
    return LayerSummary(
        plan.component.name,
        layer.name,
        layer.kind,
        layer.shape,
        treatment.scheme,
        treatment.reason,
        plan.smoothing.get(layer.name),
        layer.bias if plan.bias_correction and treatment.scheme is not None else None,
        layer.weight.nbytes,
        sum(spec.nbytes for spec in shard.specs_of(layer.weight).values()),
    )
