"""``pack``: plan, stream tensor by tensor, check, rename into place."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration.hessian import Hessians
from quantkit.calibration.statistics import Calibration
from quantkit.checkpoint.filelist import MADE
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.schemes import scheme_to_json
from quantkit.models.source import Model
from quantkit.models.treatments import Treatment
from quantkit.numerics.scheme import Scheme
from quantkit.packing.config_files import write_config, write_index
from quantkit.packing.finishing import judged, list_written, refuse_broken
from quantkit.packing.masks import masks_beforehand
from quantkit.packing.plan import ComponentPlan, plan_component
from quantkit.packing.writer import write_shards
from quantkit.progress import Progress
from quantkit.recipe.schema import Recipe
from quantkit.sparsity.maskfile import MaskSet
from quantkit.storage.copying import copy_files, is_weight, list_files
from quantkit.storage.files import staged_directory
from quantkit.storage.places import check_directory, refuse_overlap

#: What the marker calls the output.
KIND = "packed model"


@dataclass(frozen=True)
class LayerSummary:
    """What became of one layer."""

    component: str
    name: str
    kind: str
    #: dense shape of the weight
    shape: tuple[int, ...]
    #: None: it stays as it was
    scheme: Scheme | None
    #: why it stays, or why it is dense though sparsity was wanted; else ""
    reason: str
    #: SmoothQuant's strength; None: none of it
    smooth_alpha: float | None
    #: whether the bias was corrected; None: not asked for, False: there is no bias
    bias_corrected: bool | None
    #: of the weight, its scales and metadata
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ComponentSummary:
    """What became of the weight files of one component."""

    name: str
    class_name: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class PackSummary:
    """What was packed, kept, copied and left out."""

    output: Path
    components: tuple[ComponentSummary, ...]
    layers: tuple[LayerSummary, ...]
    #: of files that are copied as they are
    copied_files: int
    copied_bytes: int
    #: weights beside those that were packed, relative to the model: not in the output
    left_out: tuple[Path, ...]

    @property
    def bytes_before(self) -> int:
        """Size of the packed weight files' sources and of all that is copied."""
        return self.copied_bytes + sum(c.bytes_before for c in self.components)

    @property
    def bytes_after(self) -> int:
        """Size of the output, config files aside."""
        return self.copied_bytes + sum(c.bytes_after for c in self.components)

    def by_scheme(self) -> dict[Scheme, int]:
        """Return how many layers each treatment has."""
        counts: dict[Scheme, int] = {}
        for layer in self.layers:
            if layer.scheme is not None:
                counts[layer.scheme] = counts.get(layer.scheme, 0) + 1
        return counts

    def kept(self) -> dict[str, list[str]]:
        """Return the layers that stay as they were, by reason."""
        return _by_reason(layer for layer in self.layers if layer.scheme is None)

    def by_alpha(self) -> dict[float, list[str]]:
        """Return the layers that SmoothQuant smooths, by its strength, ascending."""
        layers: dict[float, list[str]] = {}
        for layer in self.layers:
            if layer.smooth_alpha is not None:
                layers.setdefault(layer.smooth_alpha, []).append(layer.name)
        return dict(sorted(layers.items()))

    def uncorrected(self) -> list[str]:
        """Return the packed layers whose bias was to be corrected, and that have none."""
        return [layer.name for layer in self.layers if layer.bias_corrected is False]

    def dense(self) -> dict[str, list[str]]:
        """Return the layers that are packed, but not sparse as the recipe wants, by reason."""
        return _by_reason(layer for layer in self.layers if layer.scheme and layer.reason)


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
    if masks is None:
        masks = masks_beforehand(model, recipe, calibration, hessians, progress=progress)
    components = tuple(
        plan_component(
            component,
            recipe,
            calibration=calibration,
            masks=masks,
            hessians=hessians,
            progress=progress,
        )
        for component in model.components
    )
    return complete_plan(model, components)


def complete_plan(model: Model, components: tuple[ComponentPlan, ...]) -> PackPlan:
    """Return the plan of a model whose components are planned: what else is copied, or left out."""
    # Weights at the root of a pipeline are single-file copies of all of it, unpacked.
    root = [f for f in list_files(model.path) if _owner(f, model) is None and f.name not in MADE]
    dropped = [file for file in root if is_weight(file) and file.parent == Path()]
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
) -> PackSummary:
    """Write the packed checkpoint of a model: all of it, or nothing.

    Args:
        model: the 16-bit source, which is only read.
        recipe: what is wanted.
        output: the directory to make.
        calibration: statistics for static scales, smoothing and Wanda.
        masks: which weights are kept; without them the recipe's sparsity section decides.
        threads: tensors in work at the same moment; the bytes do not depend on it.
        force: replace an existing output once the new one is complete.
        progress: told of tensors done.
        hessians: second moments, for gptq rounding and sparsegpt masks.

    Raises:
        InputError: anything that is wrong with the input; ``output`` is as it was.
    """
    refuse_overlap(output, model.path)
    check_directory(output, kind=KIND, force=force)
    plan = plan_pack(
        model, recipe, calibration=calibration, masks=masks, hessians=hessians, progress=progress
    )
    with staged_directory(output, kind=KIND, force=force) as stage, judged(plan.components):
        copy_files(model.path, stage, plan.copied)
        for component in plan.components:
            _write_component(component, stage, threads, progress)
        list_written(stage, plan.copied, plan.packed)
        # The reader's own check, before the directory gets its name.
        refuse_broken(open_packed(stage))
    return summarize(plan, output)


def summarize(plan: PackPlan, output: Path) -> PackSummary:
    """Return what a plan makes of the model; the sizes are exact."""
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
        write_index(component.index, plan.shards, folder / component.index.name)
    write_config(component.path / "config.json", plan.config, folder / "config.json")


def _owner(file: Path, model: Model) -> str | None:
    """Return the packed component that a file (relative to the model) belongs to."""
    for component in model.components:
        if not component.name or file.parts[0] == component.name:
            return component.name
    return None


def _summarize_component(plan: ComponentPlan) -> ComponentSummary:
    before = sum(shard.stat().st_size for shard in plan.component.shards)
    after = sum(shard.nbytes for shard in plan.shards)
    return ComponentSummary(plan.component.name, plan.component.class_name, before, after)


def _summarize_layer(plan: ComponentPlan, treatment: Treatment) -> LayerSummary:
    layer = treatment.layer
    shard = next(s for s in plan.shards if layer.weight.name in s.source.tensors)
    return LayerSummary(
        plan.component.name,
        layer.name,
        layer.kind,
        layer.shape,
        treatment.scheme,
        treatment.reason,
        plan.smoothing[layer.name].alpha if layer.name in plan.smoothing else None,
        layer.bias if plan.bias_correction and treatment.scheme is not None else None,
        layer.weight.nbytes,
        sum(spec.nbytes for spec in shard.specs_of(layer.weight).values()),
    )


def _by_reason(layers: Iterable[LayerSummary]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        reasons.setdefault(layer.reason, []).append(layer.name)
    return reasons


def to_json(summary: PackSummary) -> dict[str, Any]:
    """Return the summary as JSON values."""
    values = asdict(summary)
    for entry, layer in zip(values["layers"], summary.layers, strict=True):
        entry["scheme"] = None if layer.scheme is None else scheme_to_json(layer.scheme)
    values["output"] = str(summary.output)
    values["left_out"] = [str(file) for file in summary.left_out]
    sizes = {"bytes_before": summary.bytes_before, "bytes_after": summary.bytes_after}
    return {"output": values.pop("output"), **sizes, **values}
