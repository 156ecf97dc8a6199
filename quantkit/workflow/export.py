"""Writing models for other programs: one row for each kind of output."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from quantkit.errors import InputError, ModelError
from quantkit.interchange.comfyui_export import (
    COMFYUI,
    COMFYUI_INT8,
    COMFYUI_W4A8,
    plan_comfyui,
)
from quantkit.interchange.component_export import KIND, ComponentFile, DirectoryPlan
from quantkit.interchange.compressed_tensors_export import (
    WEIGHTS,
    compressed_tensors_config,
    plan_compressed_tensors,
)
from quantkit.interchange.exported import Export
from quantkit.interchange.fp8r_export import plan_fp8r
from quantkit.interchange.gguf_export import plan_gguf
from quantkit.interchange.sdnq_export import plan_sdnq, sdnq_config
from quantkit.interchange.single_file_export import plan_single_file
from quantkit.interchange.targets import Target
from quantkit.interchange.tensor_export import OneFile
from quantkit.models import source as models
from quantkit.models.pipeline_index import scheduler_config
from quantkit.progress import Progress, silent
from quantkit.recipe.schema import Recipe
from quantkit.storage.places import check_directory, check_file, refuse_overlap
from quantkit.workflow.arguments import (
    CalibrationLike,
    HessiansLike,
    ModelLike,
    RecipeLike,
    as_calibration,
    as_hessians,
    as_model,
    as_recipe,
)
from quantkit.workflow.export_check import for_target, refuse_other_formats
from quantkit.workflow.export_source import (
    Part,
    Quantizing,
    Source,
    dense_source,
    is_packed,
    packed_source,
    planned_source,
    quantized_source,
    refuse_encoder,
    refuse_rest,
)

__all__ = ["Export", "export"]


class Plan(Protocol):
    """Everything about an output but its data."""

    @property
    def formats(self) -> tuple[Mapping[str, str], ...]:
        """Of each component, the formats of the weights that are quantized in the output."""
        ...

    def summary(self, output: Path) -> Export:
        """Return the contents of the output."""
        ...

    def write(self, output: Path, *, force: bool, progress: Progress) -> Export:
        """Write the output: all of it, or nothing."""
        ...


@dataclass(frozen=True)
class ExportRequest:
    """A request for an export."""

    source: Source
    #: after the colon of ``to``
    variant: str
    convolutions: bool
    requantize: bool

    @property
    def part(self) -> Part:
        """The one component of an output that holds one."""
        if len(self.source.parts) > 1:
            raise ModelError(
                f"{self.source.model}: {len(self.source.parts)} denoisers, and a file holds one; "
                "pass the directory of one"
            )
        return self.source.parts[0]


@dataclass(frozen=True)
class Exporter:
    """A kind of output that models are exported to."""

    plan: Callable[[ExportRequest], Plan]
    #: the kinds that it comes in, after the colon
    variants: tuple[str, ...] = ()
    #: the default recipe of a 16-bit model; "": it is not quantized
    recipe: str = ""
    #: whether convolutions are quantized on the way
    convolutions: bool = False
    #: the output is a directory
    directory: bool = False
    #: text encoders are exported, else denoisers
    encoders: bool = False


def _plan_comfyui(target: Target) -> Callable[[ExportRequest], Plan]:
    def plan(request: ExportRequest) -> OneFile:
        file = plan_comfyui(
            request.part.source,
            target,
            requantize=request.requantize,
            scheduler=scheduler_config(request.source.model),
        )
        return OneFile(file)

    return plan


def _plan_single_file(request: ExportRequest) -> OneFile:
    return OneFile(plan_single_file(request.part.source))


def _plan_fp8r(request: ExportRequest) -> OneFile:
    file = plan_fp8r(request.part.source, requantize=request.requantize)
    return OneFile(file)


def _plan_gguf(request: ExportRequest) -> Plan:
    return plan_gguf(
        request.part.source,
        request.variant,
        convolutions=request.convolutions,
        requantize=request.requantize,
    )


def _plan_sdnq(request: ExportRequest) -> DirectoryPlan:
    files = []
    for part in request.source.parts:
        plan = plan_sdnq(part.source, requantize=request.requantize)
        name = f"{models.WEIGHTS}.safetensors"
        files.append(ComponentFile(part.folder, plan, name, sdnq_config(plan)))
    return DirectoryPlan(request.source.model, tuple(files))


def _plan_compressed_tensors(request: ExportRequest) -> DirectoryPlan:
    files = []
    for part in request.source.parts:
        plan = plan_compressed_tensors(part.source, requantize=request.requantize)
        config = compressed_tensors_config(plan)
        files.append(ComponentFile(part.folder, plan, WEIGHTS, config))
    return DirectoryPlan(request.source.model, tuple(files))


#: What ``to`` takes: a name, and for those with variants one of them after a colon.
EXPORTERS: Mapping[str, Exporter] = {
    "comfyui": Exporter(_plan_comfyui(COMFYUI), recipe="comfyui"),
    "comfyui-int8": Exporter(_plan_comfyui(COMFYUI_INT8), recipe="comfyui-int8"),
    "comfyui-w4a8": Exporter(_plan_comfyui(COMFYUI_W4A8), recipe="comfyui-w4a8"),
    "sdnq": Exporter(_plan_sdnq, recipe="fp8", convolutions=True, directory=True),
    "single-file": Exporter(_plan_single_file),
    "fp8r": Exporter(_plan_fp8r, recipe="fp8"),
    "compressed-tensors": Exporter(
        _plan_compressed_tensors, recipe="fp8", directory=True, encoders=True
    ),
    "gguf": Exporter(_plan_gguf, variants=("Q8_0", "Q4_0")),
}


def export(
    model: ModelLike,
    *,
    to: str,
    output: str | Path,
    recipe: RecipeLike | None = None,
    calibration: CalibrationLike | None = None,
    hessians: HessiansLike | None = None,
    requantize: bool = False,
    convolutions: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> Export:
    """Write a model for another program: all of it, or nothing.

    Codes of a packed model are taken over where the target holds them. A 16-bit model is quantized
    on the way, which loses least.

    Args:
        model: a pipeline's or component's directory, 16-bit or packed, a hub id, a .gguf file with
            its config, or opened.
        to: comfyui, comfyui-int8, comfyui-w4a8, sdnq, single-file, fp8r, compressed-tensors,
            gguf:Q8_0 or gguf:Q4_0.
        output: the file, or the directory, to make.
        recipe: that a 16-bit model is quantized by; None: as the target wants it.
        calibration: statistics of the model, which the recipe may need.
        hessians: second moments of the model, which the recipe may need, and by which comfyui-int8
            and comfyui-w4a8 choose rotations and round what they rotate.
        requantize: convert what the target does not hold, at the price of some error.
        convolutions: of gguf: quantize them, too; the file is for ComfyUI-GGUF alone then.
        force: replace an existing output once the new one is complete.
        dry_run: only say what would be written.
        progress: told of tensors done.

    Returns:
        what the output holds, and what was lost on the way.

    Raises:
        InputError: anything that is wrong with the input; ``output`` is as it was.
    """
    exporter, variant = _find(to)
    place = Path(output)
    if convolutions and not exporter.variants:
        raise InputError(
            f"convolutions with {to}: only gguf has a choice; drop it", fields=("convolutions",)
        )
    given = {"recipe": recipe, "calibration": calibration, "hessians": hessians}
    how = _quantizing(model, to, exporter, given)
    _check(place, model, exporter, force=force)
    with ExitStack() as stack:
        source = _source(model, how, exporter, progress)
        if exporter.directory:
            refuse_rest(source)
        asked = None if how is None else _recipe_of(exporter, recipe)
        request = ExportRequest(source, variant, convolutions, requantize)
        plan = _planned(exporter, request, asked)
        if dry_run:
            return plan.summary(place)
        if how is not None:
            quantized = quantized_source(model, how, place, progress, planned=source)
            plan = _planned(
                exporter, replace(request, source=stack.enter_context(quantized)), asked
            )
        return plan.write(place, force=force, progress=progress)


def _planned(exporter: Exporter, request: ExportRequest, asked: Recipe | None) -> Plan:
    """Return the plan of an output that holds what was asked for."""
    plan = exporter.plan(request)
    refuse_other_formats(request.source, plan.formats, recipe=asked, requantize=request.requantize)
    return plan


def _find(to: str) -> tuple[Exporter, str]:
    name, _, variant = to.partition(":")
    row = EXPORTERS.get(name)
    if row is None or variant not in (row.variants or ("",)):
        raise InputError(
            f"to {to!r:.80}: unknown, expected one of {', '.join(targets())}", fields=("to",)
        )
    return row, variant


def targets() -> tuple[str, ...]:
    """Return all values of ``to``."""
    return tuple(
        f"{name}:{variant}" if variant else name
        for name, row in EXPORTERS.items()
        for variant in (row.variants or ("",))
    )


def _quantizing(
    model: ModelLike, to: str, exporter: Exporter, given: Mapping[str, Any]
) -> Quantizing | None:
    """Return the settings for packing a 16-bit model on the way; None: it is not."""
    if is_packed(model) or not exporter.recipe:
        for name, value in given.items():
            if value is not None:
                why = (
                    "the model is packed" if is_packed(model) else f"{to} does not quantize by one"
                )
                raise InputError(f"{name} {value!s:.200}: {why}; drop it", fields=(name,))
        return None
    recipe = for_target(_recipe_of(exporter, given["recipe"]), to, encoders=exporter.encoders)
    if not exporter.convolutions:
        recipe = recipe.model_copy(update={"convolutions": False})
    return Quantizing(recipe, as_calibration(given["calibration"]), as_hessians(given["hessians"]))


def _recipe_of(exporter: Exporter, recipe: RecipeLike | None) -> Recipe:
    """Return the recipe of a 16-bit model; the target's own keeps what the family keeps."""
    if recipe is not None:
        return as_recipe(recipe)
    return as_recipe(exporter.recipe).model_copy(update={"tuned": None})


def _check(output: Path, model: ModelLike, exporter: Exporter, *, force: bool) -> None:
    """Refuse an output that could not be written, before anything long."""
    if exporter.directory:
        if isinstance(model, str | Path) and Path(model).is_dir():
            refuse_overlap(output, Path(model))
        check_directory(output, kind=KIND, force=force)
    else:
        check_file(output, force=force)


def _source(
    model: ModelLike, how: Quantizing | None, exporter: Exporter, progress: Progress
) -> Source:
    """Return the source of the export; a model to pack on the way counts as packed."""
    if is_packed(model):
        assert isinstance(model, str | Path)
        return packed_source(Path(model), encoders=exporter.encoders)
    if not exporter.encoders:
        model = as_model(model)
        refuse_encoder(model)
    return dense_source(model) if how is None else planned_source(model, how, progress)
